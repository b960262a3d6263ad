"""Cross entropy of hidden @ weight.T, which computes only one chunk of rows of logits at a time.

The backward recomputes the logits, and needs the hidden states, the weight, and the logarithm of
each row's sum of exponentials.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from . import cross_entropy, handover, levels
from .handover import TwoParts, Weights
from .operation import wide

Reduction = Literal["mean", "sum"]

# Every chunk costs a pass over the gradient of the weight, so chunks are few: each has a quarter of
# the rows, but enough rows to keep a GPU busy, and not so many that logits take too much memory.
_FEWEST_ROWS, _MOST_ROWS, _NUM_CHUNKS = 2048, 4096, 4
# Elements of a weight's gradient that are computed at a time. In float32 they stay in a GPU's cache
# until they have been added to the total.
_BLOCK = 2**23
# Rows of logits begin at a multiple of this many elements, for wide memory accesses.
_ALIGNMENT = 16


def chunks(num_rows: int) -> list[slice]:
    """Chunks of rows whose logits are computed together. At least one chunk."""
    size = min(max(-(-num_rows // _NUM_CHUNKS), _FEWEST_ROWS), _MOST_ROWS)
    return [slice(start, start + size) for start in range(0, max(num_rows, 1), size)]


class FusedHead:
    """The product of hidden states and a weight, and its cross entropy with some targets.

    Args:
        hidden: [rows, h].
        weight: [V, h], of the same type.
        target: int64 [rows].
        ignore_index: the target of rows that do not count.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> None:
        self._hidden = hidden
        self._weight = weight
        self._target = target
        self._rule = (len(weight), ignore_index)

    def room(self, num_rows: int) -> Tensor:
        """An empty tensor for rows of logits, with the padding of each row."""
        width = -(-len(self._weight) // _ALIGNMENT) * _ALIGNMENT
        return self._hidden.new_empty((num_rows, width))

    def losses(self, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        """The losses of all rows, and the logarithms of their sums of exponentials.

        Args:
            kept: a tensor of `room` to store all logits for `gradients`; None to drop them.
        """
        made = [
            cross_entropy.losses(logits, self._target[rows], None, *self._rule)
            for rows, logits in self._logits(into=kept)
        ]
        losses, log_sums = zip(*made, strict=True)
        return torch.cat(losses), torch.cat(log_sums)

    def gradients(
        self, log_sums: Tensor, scale: Tensor, kept: Tensor | None, *places: Tensor | None
    ) -> None:
        """Computes the gradients of the sum of all losses, times the scale.

        Args:
            log_sums: of `losses`.
            scale: [].
            kept: of `losses`.
            *places: a tensor to store the gradient of the hidden states in, and a tensor, of the
                weight's type or a wider one, to add the gradient of the weight to; None for an
                unwanted gradient.
        """
        for rows, logits in self._logits(kept=kept):
            cross_entropy.gradients(logits, log_sums[rows], self._target[rows], scale, *self._rule)
            self._spread(rows, logits, *places)

    def in_one_pass(self, scale: Tensor, *places: Tensor | None) -> Tensor:
        """The losses of all rows; also computes gradients, as `gradients`."""
        made = []
        for rows, logits in self._logits():
            losses, _ = cross_entropy.losses(logits, self._target[rows], scale, *self._rule)
            self._spread(rows, logits, *places)
            made.append(losses)
        return torch.cat(made)

    def _logits(
        self, *, into: Tensor | None = None, kept: Tensor | None = None
    ) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of logits, in the same memory one after another unless `into` has room for all."""
        parts = chunks(len(self._hidden))
        room = self.room(len(self._hidden[parts[0]])) if into is None else into
        for rows in parts:
            hidden = self._hidden[rows]
            logits = room[: len(hidden)] if into is None else room[rows]
            if kept is None:
                torch.mm(hidden, self._weight.t(), out=logits[:, : len(self._weight)])
            else:
                logits.copy_(kept[rows])
            yield rows, logits

    def _spread(
        self, rows: slice, logits: Tensor, of_hidden: Tensor | None, of_weight: Tensor | None
    ) -> None:
        """Computes gradients of hidden states and weight from gradients of some rows of logits."""
        gradients = logits[:, : len(self._weight)]
        if of_hidden is not None:
            torch.mm(gradients, self._weight, out=of_hidden[rows])
        if of_weight is not None:
            add_product(of_weight, gradients.t(), self._hidden[rows])


def add_product(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Adds first @ second to a matrix of their type or a wider one, in blocks to save memory.

    Sums round as in autograd, when it adds one gradient to another.
    """
    size = max(_BLOCK // total.shape[1] // 128, 1) * 128
    # A GPU can multiply narrow factors into a wide product; elsewhere factors must be as wide.
    mixed = total.is_cuda and total.dtype is torch.float32 and second.dtype.itemsize == 2
    if not mixed:
        second = second.to(total.dtype)
    for start in range(0, len(total), size):
        factor = first[start : start + size]
        if mixed:
            product = torch.mm(factor, second, out_dtype=torch.float32)
        else:
            product = factor.to(total.dtype) @ second
        total[start : start + size].add_(product)


class _LinearCrossEntropy(TwoParts):
    weights = (1,)

    @staticmethod
    def compute(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        ignore_index: int,
        mean: bool,
        dtype: torch.dtype,
    ) -> Tensor:
        narrow = hidden.to(dtype)
        head = FusedHead(narrow, weight.to(dtype), target, ignore_index)
        kept = head.room(len(hidden)) if levels.level() == "none" else None
        losses, log_sums = head.losses(kept)
        num_rows = (target != ignore_index).sum() if mean else None
        ctx.save_for_backward(narrow, weight, target, log_sums, num_rows, kept)
        ctx.ignore_index, ctx.dtype = ignore_index, hidden.dtype
        return losses.sum() if num_rows is None else losses.sum() / num_rows

    @staticmethod
    def gradients(ctx: Any, *gradients: Tensor) -> tuple[list[Tensor | None], Weights]:
        hidden, weight, target, log_sums, num_rows, kept = ctx.saved_tensors
        scale = gradients[0] if num_rows is None else gradients[0] / num_rows
        ignore_index = ctx.ignore_index

        def compute(*places: Tensor | None) -> None:
            # A caller of the backward may be within autocast, which would round sums.
            with torch.autocast(hidden.device.type, enabled=False):
                head = FusedHead(hidden, weight.to(hidden.dtype), target, ignore_index)
                head.gradients(log_sums, scale, kept, *places)

        wants_hidden, wants_weight, *_ = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = None
        if wants_weight and not handover.are_taken():
            of_weight = _zeros(weight, len(hidden))
        if of_hidden is not None or of_weight is not None:
            compute(of_hidden, of_weight)

        def weights() -> dict[int, Tensor]:
            total = of_weight
            if total is None:
                total = _zeros(weight, len(hidden))
                with torch.no_grad():
                    compute(None, total)
            return {1: total.to(weight.dtype)}

        result = None if of_hidden is None else of_hidden.to(ctx.dtype)
        return [result, None, None, None, None, None], weights


def _zeros(weight: Tensor, num_rows: int) -> Tensor:
    """Zeros to add up the gradient of a weight, so that a sum of chunks is rounded once."""
    dtype = wide(weight[:0]).dtype if len(chunks(num_rows)) > 1 else weight.dtype
    return torch.zeros_like(weight, dtype=dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Same as F.cross_entropy(hidden @ weight.T, target), without the logits of all rows at once.

    The operation saves `hidden` and 4 bytes per row, and its backward recomputes the logits; a
    backward in two parts does so in each part. At level "none" the operation saves the logits, too.
    Within `torch.autocast`, products have autocast's type, as in nn.Linear.

    Args:
        hidden: floating [..., h].
        weight: floating [V, h], of the same type and device.
        target: int64 [...], 0 <= target < V, or `ignore_index`. Targets are not checked before
            kernels run: any other target makes the loss, and the gradients of its row, NaN.
        ignore_index: the target of rows that do not count.
        reduction: "mean" over the rows that count, which is NaN without such rows; or "sum".

    Returns:
        The loss, float32 [], or float64 if `hidden` is float64.

    Raises:
        ValueError: a shape, device or reduction is wrong.
        TypeError: a type is wrong.

    Paper: E. Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024
        (arXiv 2411.09009), section 4.3, saves as little; we cut rows, not rows and columns.
    """
    dtype = check(hidden, weight, target, reduction)
    with torch.autocast(hidden.device.type, enabled=False):
        return _LinearCrossEntropy.apply(  # type: ignore[no-any-return,no-untyped-call]
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            target.reshape(-1),
            ignore_index,
            reduction == "mean",
            dtype,
        )


def check(hidden: Tensor, weight: Tensor, target: Tensor, reduction: str) -> torch.dtype:
    """Raises as `linear_cross_entropy` does; returns the type that products are computed in."""
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be [V, h], both above 0, got {tuple(weight.shape)}")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [..., {weight.shape[1]}] as weight says, got {tuple(hidden.shape)}"
        )
    if target.shape != hidden.shape[:-1]:
        raise ValueError(
            f"target must be {tuple(hidden.shape[:-1])}, one for each row of hidden, got "
            f"{tuple(target.shape)}"
        )
    devices = {hidden.device, weight.device, target.device}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"hidden, weight and target must be on one device, got {names}")
    if target.dtype != torch.int64:
        raise TypeError(f"target must be int64, got {target.dtype}")
    return _type_of_products(hidden, weight)


def _type_of_products(hidden: Tensor, weight: Tensor) -> torch.dtype:
    types = {hidden.dtype, weight.dtype}
    kind = hidden.device.type
    floating = hidden.is_floating_point() and weight.is_floating_point()
    # Autocast leaves float64 unchanged, as in torch.
    if floating and torch.is_autocast_enabled(kind) and torch.float64 not in types:
        return torch.get_autocast_dtype(kind)
    if len(types) > 1 or not floating:
        raise TypeError(
            f"hidden and weight must be floating and of one type, got {hidden.dtype} and "
            f"{weight.dtype}"
        )
    return hidden.dtype
