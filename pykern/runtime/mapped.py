"""A step whose loss function is given with the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..tensors.trees import map_tensors
from .loss import Losses
from .stage.stage import Ends


class Mapped:
    """The `finish` of such a step. Keeps the results of the function by microbatch.

    Graph mode replays steps of `Losses` alone, and runs these as usual.

    Args:
        function: called with (output, target), or (output) without targets; returns the loss of a
            microbatch, or a tuple that begins with it.

    Attributes:
        results: by microbatch, detached.
        losses: of the step, whose function is `loss`.
    """

    losses: Losses
    # The losses make gradients of the shapes and types of the function's results.
    knows_gradients = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.results: dict[int, Any] = {}
        self._rest: tuple[Any, ...] | None = None

    @property
    def scale(self) -> Tensor | None:
        """The factor of all gradients; None for 1."""
        return self.losses.scale

    def end(self) -> None:
        """Lets go of the losses, which refer back to this object, and hold the targets."""
        vars(self).pop("losses", None)

    def loss(self, output: Any, *target: Any) -> Any:
        """The loss of a microbatch. Other values that the function returns are kept."""
        found = self.function(output, *target)
        # Plans of several replicas are refused, so one last stage calls this for one microbatch
        # after another.
        self._rest = None
        if isinstance(found, tuple) and found:
            found, *rest = found
            self._rest = tuple(rest)
        return found

    def __call__(self, microbatch: int, output: Any, once: bool) -> Ends:
        """The tensors that the backward of a microbatch starts from, and their gradients."""
        ends = self.losses(microbatch, output, once)
        loss = self.losses.of(microbatch)
        found = loss if self._rest is None else (loss, *self._rest)
        self.results[microbatch] = map_tensors(Tensor.detach, found)
        self._rest = None
        return ends
