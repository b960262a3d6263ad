"""The loss of a step: one per microbatch, weighted so that together they are the full batch's."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter, mul
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..kernels.head_loss import WithGradients
from ..tensors.finite import require_finite
from ..tensors.trees import all_tensors
from .microbatch import to_device

Loss = Callable[..., Tensor]


# The types whose products and sums Python's numbers give with torch's bits, and what `array` calls
# them: a product or sum of two numbers of 24 bits that is rounded to 53, then to 24, is the same as
# one that is rounded once.
_CODES = {torch.float32: "f", torch.float64: "d"}


class InOnePass(Protocol):
    """A loss that may come with gradients, those of parameters already added to their `.grad`."""

    def with_gradients(
        self, output: Any, target: Any, share: float | Tensor
    ) -> WithGradients | None:
        """Loss and gradients by the share of a microbatch; None for the ordinary way."""


class Losses:
    """Computes the loss of each microbatch, and where its backward starts.

    Backward starts from the loss with the microbatch's weight as gradient, which gives the same
    bits as the backward of loss * weight. A loss that has `with_gradients` is asked first whether
    it does its part of the backward at once: see `pykern.kernels.head_loss`.

    Args:
        loss_fn: called with (output, target), or (output) without targets.
        targets: one per microbatch, or None.
        weights: share of each microbatch in the loss of the batch.
        scale: by which all gradients are multiplied: float32 []; None for 1.
        must_be_finite: whether a loss that is not is an error.
        in_one_memory: whether what one action has written all others may read, as on CPU workers.

    Attributes:
        function: the loss.
        scale: as given.
        is_in_one_pass: whether the loss is an `InOnePass`.
    """

    def __init__(
        self,
        loss_fn: Loss,
        targets: Sequence[Any] | None,
        weights: Sequence[float],
        scale: Tensor | None = None,
        *,
        must_be_finite: bool = False,
        in_one_memory: bool = False,
    ) -> None:
        self.function = loss_fn
        self.scale = scale
        self._must_be_finite = must_be_finite
        self._targets = targets
        self._weights = weights
        # Numbers where `_type` is known, which takes less time than tensors.
        self._losses: list[Tensor | float | None] = [None] * len(weights)
        self.is_in_one_pass = callable(getattr(loss_fn, "with_gradients", None))
        self._in_one_memory = in_one_memory
        # All targets are parts of one tree.
        first = targets[0] if targets else None
        self._on_cpu = type(first) is Tensor and first.is_cpu
        # Where losses on the CPU start, by microbatch, and of which type: made with the first.
        # One for each: a hook may write into it.
        self._starts: list[Tensor] = []
        self._type: torch.dtype | None = None

    @property
    def knows_gradients(self) -> bool:
        """Whether gradients are made here, of the shape and type of their outputs."""
        return not self.is_in_one_pass

    def __call__(
        self, microbatch: int, output: Any, once: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The last stage's output becomes a loss; returns where backward starts, and gradients.

        Args:
            microbatch: which one.
            output: of the last stage.
            once: whether there is no R that gives any of the step's outputs once more.
        """
        if self._targets is None:
            loss = self.function(output)
        else:
            target = self._targets[microbatch]
            if not (self._on_cpu and type(output) is Tensor and output.is_cpu):
                target = to_device(target, _device_of(output))
            # What adds to gradients must not happen twice.
            if once and self.is_in_one_pass:
                function = cast(InOnePass, self.function)
                weight = self._weights[microbatch]
                share = weight if self.scale is None else self.scale.to(_device_of(output)) * weight
                ended = function.with_gradients(output, target, share)
                if ended is not None:
                    self._keep(microbatch, ended.loss)
                    return ended.outputs, ended.gradients
            loss = self.function(output, target)
        if not (
            type(loss) is Tensor
            and loss.dtype is self._type
            and loss.is_cpu
            and loss.requires_grad
            and loss.dim() == 0
        ):
            _require_scalar(loss, microbatch)
            if not self._make_starts(loss):
                kept = loss.detach()
                if self._must_be_finite:
                    self._require_finite(microbatch, kept)
                self._losses[microbatch] = kept
                return (loss,), (self._start(microbatch, loss),)
        if self._must_be_finite:
            self._require_finite(microbatch, loss)
        self._losses[microbatch] = loss.item()
        return (loss,), (self._starts[microbatch],)

    def _keep(self, microbatch: int, loss: Tensor) -> None:
        if self._must_be_finite:
            self._require_finite(microbatch, loss)
        self._losses[microbatch] = loss

    def _require_finite(self, microbatch: int, loss: Tensor) -> None:
        require_finite(loss, "the loss", f"the last stage, microbatch {microbatch}")

    def _start(self, microbatch: int, loss: Tensor) -> Tensor:
        """The gradient of a loss.

        One for each: two stages that end on one GPU could not share it without waiting.
        """
        weight = self._weights[microbatch]
        if self.scale is not None:
            # Rounded in the order of the backward of (loss * weight) * scale.
            return self.scale.to(loss.device, loss.dtype) * weight
        return torch.full_like(loss, weight, requires_grad=False)

    def _make_starts(self, loss: Tensor) -> bool:
        """Makes the gradients of all losses if this one is as those on CPU workers usually are.

        That takes less time than one by one. All of them have one type.
        """
        plain = type(loss) is Tensor and loss.is_cpu and loss.dtype in _CODES
        another = self._type not in (None, loss.dtype)
        if not plain or another or not self._in_one_memory or self.scale is not None:
            return False
        starts: list[Tensor] = []
        for alike, group in groupby(self._weights):
            count = len(list(group))
            starts += torch.full((count,), alike, dtype=loss.dtype, device="cpu").unbind()
        # The type last: from then on another thread may look here.
        self._starts, self._type = starts, loss.dtype
        return True

    def of(self, microbatch: int) -> Tensor:
        """The loss of a microbatch that has ended."""
        loss = self._losses[microbatch]
        assert loss is not None
        return loss if isinstance(loss, Tensor) else torch.tensor(loss, dtype=self._type)

    def among(
        self, targets: Sequence[Any] | None, count: int, scale: Tensor | None = None
    ) -> Losses:
        """The same loss for as many other targets, each weighted as the first here is."""
        return Losses(self.function, targets, [self._weights[0]] * count, scale)

    def take(self, losses: Sequence[Tensor]) -> None:
        """Takes the losses of all microbatches, computed elsewhere."""
        for microbatch, loss in enumerate(losses):
            self._keep(microbatch, loss)

    def total(self) -> Tensor:
        """The loss of the batch: weighted losses added in ascending order of microbatches.

        Where the last stages of several replicas are on several devices, it is on the first's.
        """
        ran = [number for number, loss in enumerate(self._losses) if loss is not None]
        weights = [self._weights[number] for number in ran]
        numbers = [loss for loss in self._losses if type(loss) is float]
        if self._type is not None and len(numbers) == len(ran):
            return _sum_of_numbers(numbers, weights, self._type)
        losses = [self.of(number) for number in ran]
        home = losses[0].device
        terms: list[Tensor] = []
        # Equal weights stand together. One product for each, because a call for every microbatch
        # would be most of what a step of tiny stages costs beyond its actions.
        for weight, group in groupby(zip(weights, losses, strict=True), key=itemgetter(0)):
            terms += (torch.stack([loss.to(home) for _, loss in group]) * weight).unbind()
        first, *others = terms
        total = first.clone()
        for term in others:
            total += term
        return total


def _sum_of_numbers(
    losses: Sequence[float], weights: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """The sum of losses by weight, in their order, rounded as torch rounds: []."""
    code = _CODES[dtype]
    terms = array(code, map(mul, losses, array(code, weights)))
    total = terms[:1]
    for term in terms[1:]:
        total[0] += term
    return torch.tensor(total[0], dtype=dtype)


def _require_scalar(loss: object, microbatch: int) -> None:
    """Raises where there is no backward from a loss.

    Raises:
        ValueError: it is not a real tensor without dimensions.
        RuntimeError: it does not require grad.
    """
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        found = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(
            f"loss_fn must return a tensor without dimensions for each microbatch, got {found}"
        )
    if loss.is_complex():
        raise ValueError(
            f"loss_fn must return a real tensor for each microbatch, got {loss.dtype}. Return "
            "the abs() or the real part of the loss"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            f"the loss of microbatch {microbatch} does not require grad: it depends on nothing "
            "that trains"
        )


def _device_of(output: Any) -> torch.device:
    """Where the first tensor of an output is."""
    if isinstance(output, Tensor):
        return output.device
    return next((tensor.device for tensor in all_tensors(output)), torch.device("cpu"))
