"""The loss of a step: one per microbatch, weighted so that their sum is the full batch's loss."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import groupby
from math import isnan
from operator import itemgetter, mul
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..kernels.head_loss import WithGradients
from ..tensors.finite import require_finite
from ..tensors.trees import all_tensors
from ..torch_private.bare_calls import bare
from ..user_code import warn
from .microbatch import to_device

Loss = Callable[..., Tensor]


# The dtypes for which Python's floats give the same products and sums as torch, bit for bit, with
# their type codes in `array`. A product or sum of two 24-bit numbers that is rounded to 53 bits and
# then to 24 bits equals the result that is rounded once.
_CODES = {torch.float32: "f", torch.float64: "d"}
# Bytes that a loss may hold until its step ends. A copy takes a GPU as long as any small operation.
_MOST_HELD = 2**20


class InOnePass(Protocol):
    """A loss that may compute gradients at once, and add up the `.grad` of parameters."""

    def with_gradients(
        self, output: Any, target: Any, share: float | Tensor
    ) -> WithGradients | None:
        """The loss, and gradients times the microbatch's share; None to use autograd instead."""


class Losses:
    """Computes the loss of each microbatch, and where its backward starts.

    Backward starts from the loss with the microbatch's weight as gradient, which gives the same
    bits as the backward of loss * weight. If a loss has `with_gradients`, that is called first and
    may do the loss's part of the backward at once: see `pykern.kernels.head_loss`.

    Args:
        loss_fn: called with (output, target), or (output) without targets.
        targets: one per microbatch, or None.
        weights: share of each microbatch in the loss of the batch.
        scale: factor of all gradients: float32 []; None for 1.
        must_be_finite: whether a loss that is NaN or infinite is an error.
        in_one_memory: whether all actions may read what one action has written, as on CPU workers.

    Attributes:
        function: the loss.
        scale: as given.
        is_in_one_pass: whether the loss is an `InOnePass`.
        knows_gradients: whether starting gradients are made here, with the shape and type of their
            outputs.
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
        self._call = bare(loss_fn)
        self.scale = scale
        self._must_be_finite = must_be_finite
        self._targets = targets
        self._weights = weights
        # Python floats where `_type` is known, since these take less time than tensors.
        self._losses: list[Tensor | float | None] = [None] * len(weights)
        self.is_in_one_pass = callable(getattr(loss_fn, "with_gradients", None))
        self.knows_gradients = not self.is_in_one_pass
        self._in_one_memory = in_one_memory
        # All targets are parts of one tree.
        first = targets[0] if targets else None
        self._on_cpu = type(first) is Tensor and first.is_cpu
        # The starting gradients of losses on the CPU, by microbatch, and their dtype; made with the
        # first loss. Each microbatch has its own tensor, since a hook may write into it.
        self._starts: list[Tensor] = []
        self._type: torch.dtype | None = None

    @classmethod
    def of_one(cls, loss_fn: Loss, target: Any, *, in_one_memory: bool = False) -> Losses:
        """The loss of a single microbatch, with its target or None."""
        targets = None if target is None else [target]
        return cls(loss_fn, targets, [1.0], in_one_memory=in_one_memory)

    def __call__(
        self, microbatch: int, output: Any, once: bool
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Computes the loss; returns the tensors where backward starts, and their gradients.

        Args:
            microbatch: its index.
            output: of the last stage.
            once: whether each output of the step is computed only once, without an R.
        """
        if self._targets is None:
            loss = self._call(output)
        else:
            target = self._targets[microbatch]
            if not (self._on_cpu and type(output) is Tensor and output.is_cpu):
                target = to_device(target, _device_of(output))
            # A loss that adds to gradients must not run twice.
            if once and self.is_in_one_pass:
                function = cast(InOnePass, self.function)
                weight = self._weights[microbatch]
                share = weight if self.scale is None else self.scale.to(_device_of(output)) * weight
                ended = function.with_gradients(output, target, share)
                if ended is not None:
                    self._keep(microbatch, ended.loss)
                    return ended.outputs, ended.gradients
            loss = self._call(output, target)
        if not (
            type(loss) is Tensor
            and loss.dtype is self._type
            and loss.is_cpu
            and loss.requires_grad
            and loss.dim() == 0
        ):
            _require_scalar(loss, microbatch)
            if not self._make_starts(loss):
                kept = _without_more_memory(loss.detach())
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

        Each loss has its own tensor, since two last stages on one GPU would have to wait for each
        other to share a tensor.
        """
        weight = self._weights[microbatch]
        if self.scale is not None:
            # The product rounds in the order of the backward of (loss * weight) * scale.
            return self.scale.to(loss.device, loss.dtype) * weight
        return torch.full_like(loss, weight, requires_grad=False)

    def _make_starts(self, loss: Tensor) -> bool:
        """Makes the gradients of all losses if this loss is an ordinary one on a CPU worker.

        One call for all takes less time than a call for each. All gradients have the same dtype.
        """
        plain = type(loss) is Tensor and loss.is_cpu and loss.dtype in _CODES
        another = self._type not in (None, loss.dtype)
        if not plain or another or not self._in_one_memory or self.scale is not None:
            return False
        starts: list[Tensor] = []
        for alike, group in groupby(self._weights):
            count = len(list(group))
            starts += torch.full((count,), alike, dtype=loss.dtype, device="cpu").unbind()
        # `_type` is set last: once it is set, other threads may read `_starts`.
        self._starts, self._type = starts, loss.dtype
        return True

    def of(self, microbatch: int) -> Tensor:
        """The computed loss of a microbatch."""
        loss = self._losses[microbatch]
        assert loss is not None
        return loss if isinstance(loss, Tensor) else _number(loss, self._type)

    def among(
        self, targets: Sequence[Any] | None, count: int, scale: Tensor | None = None
    ) -> Losses:
        """The same loss function for `count` other targets, each with the first weight here."""
        return Losses(self.function, targets, [self._weights[0]] * count, scale)

    def take(self, losses: Sequence[Tensor]) -> None:
        """Stores the losses of all microbatches, which were computed elsewhere."""
        for microbatch, loss in enumerate(losses):
            self._keep(microbatch, loss)

    def total(self) -> Tensor:
        """The loss of the batch: weighted losses added in ascending order of microbatches.

        If the last stages of several replicas are on several devices, the sum is on the first.
        """
        weights, kept = self._weights, self._losses
        ran: Sequence[int] = range(len(kept))
        if kept[-1] is None:
            # Microbatches without rows are the last ones.
            ran = [number for number in ran if kept[number] is not None]
            weights, kept = [weights[number] for number in ran], [kept[number] for number in ran]
        if self._type is not None and set(map(type, kept)) == {float}:
            numbers = cast(Sequence[float], kept)
            added = _sum_of_numbers(numbers, weights, self._type)
            if isnan(added):
                _warn_of_nan(ran, numbers)
            return _number(added, self._type)
        losses = [self.of(number) for number in ran]
        home = losses[0].device
        terms: list[Tensor] = []
        # Equal weights stand together, and each weight needs one product. A call for every
        # microbatch would be most of the cost of a step of tiny stages beyond its actions.
        for weight, group in groupby(zip(weights, losses, strict=True), key=itemgetter(0)):
            terms += (torch.stack([loss.to(home) for _, loss in group]) * weight).unbind()
        first, *others = terms
        total = first.clone()
        for term in others:
            total += term
        return total


def _number(loss: float, dtype: torch.dtype | None) -> Tensor:
    """A loss of CPU workers as a tensor, also where the caller has set another default device."""
    return torch.tensor(loss, dtype=dtype, device="cpu")


def _sum_of_numbers(losses: Sequence[float], weights: Sequence[float], dtype: torch.dtype) -> float:
    """The weighted sum of losses, added in their order and rounded as torch rounds."""
    code = _CODES[dtype]
    terms = array(code, map(mul, losses, array(code, weights)))
    total = terms[:1]
    for term in terms[1:]:
        total[0] += term
    return float(total[0])


def _warn_of_nan(microbatches: Sequence[int], losses: Sequence[float]) -> None:
    """Warns if losses of some microbatches are NaN, and others are not, as means of no labels."""
    empty = [number for number, loss in zip(microbatches, losses, strict=True) if isnan(loss)]
    if 0 < len(empty) < len(losses):
        warn(
            f"the loss of the batch is NaN, from microbatch {', '.join(map(str, empty))} of "
            f"{len(losses)}. A mean over labels is NaN if all labels of a microbatch are ignored: "
            "divide a sum by the labels of the batch, with reduction='sum'"
        )


def _without_more_memory(loss: Tensor) -> Tensor:
    """The loss, to be kept until the step ends: a copy if it holds much memory.

    The mean that `mse_loss` returns still has the memory of all squares.
    """
    is_plain = type(loss) in (Tensor, FakeTensor) and loss.layout is torch.strided
    return loss.clone() if is_plain and loss.untyped_storage().nbytes() > _MOST_HELD else loss


def _require_scalar(loss: object, microbatch: int) -> None:
    """Raises if no backward can start from the loss.

    Raises:
        ValueError: the loss is not a real tensor without dimensions.
        RuntimeError: the loss does not require grad.
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
            f"the loss of microbatch {microbatch} must require grad, got one that depends on "
            "nothing that trains. Check requires_grad of the parameters, and detach() in the loss"
        )


def _device_of(output: Any) -> torch.device:
    """The device of the first tensor of an output."""
    if isinstance(output, Tensor):
        return output.device
    return next((tensor.device for tensor in all_tensors(output)), torch.device("cpu"))
