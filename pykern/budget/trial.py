"""A trial run of stages that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from .. import _C
from ..modes import set_states
from ..runtime.autograd.graph import leaves_of
from ..runtime.random.eager import NoteOwn
from ..runtime.recompute.buffers import modules_in
from ..runtime.stage.stage import Ends, Finish, Stage
from ..trace.kept_state import KeptState


class Trial:
    """Notes in a first run what changes besides the stages' own gradients, and restores it.

    Attributes:
        noting: the mode of the first run.
    """

    def __init__(self, finish: Finish) -> None:
        self._finish = finish
        # Leaves of the loss, such as its parameters, with the gradients they had before the trial.
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self.noting = NoteOwn()

    def first(self, microbatch: int, output: Any, once: bool) -> Ends:
        """The `finish` of the first run."""
        ends = self._finish(microbatch, output, once)
        for leaf in leaves_of(ends[0]):
            self._gradients.append((leaf, leaf.grad))
            leaf.grad = None
        return ends

    def without_trace(self, stages: Sequence[Stage]) -> AbstractContextManager[object]:
        """A context that restores the gradients of its notes, and all other state, at its end."""
        layers = [layer for stage in stages for layer in stage.layers]
        modules = modules_in([*layers, getattr(self._finish, "function", None)])
        state = KeptState(modules, {stage.device for stage in stages})
        return _C.Undo(self._put_back, state)

    def _put_back(self, state: KeptState) -> None:
        state.put_back()
        set_states(self.noting.begins)
        for leaf, gradient in self._gradients:
            leaf.grad = gradient
