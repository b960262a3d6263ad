"""Cross entropy of logits on GPUs, and its gradient in place. A program computes a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import next_power_of_2
from .launching import launched
from .rounding import rounded

# Elements of a row that a program loads at a time.
_BLOCK = 4096


@triton.jit
def _values(row, columns, num_classes, width):
    """Some logits in float32. Padding may have any content, and counts as -inf."""
    values = tl.load(row + columns, columns < width, other=0.0).to(tl.float32)
    return tl.where(columns < num_classes, values, float("-inf"))


@triton.jit
def _log_sum(row, num_classes, width, BLOCK: tl.constexpr):
    """The logarithm of the sum of exponentials, in one pass, relative to the largest so far."""
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, width, BLOCK):
        values = _values(row, first + tl.arange(0, BLOCK), num_classes, width)
        new = tl.maximum(largest, tl.max(values, 0))
        # Differences from -inf would be NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(values - base), 0)
        largest = new
    return tl.log(total) + tl.where(largest == float("-inf"), 0.0, largest)


@launched
@triton.jit
def _kernel(
    logits,
    target,
    losses,
    log_sums,
    scale,
    num_classes,
    width,
    row_stride,
    ignore_index,
    BLOCK: tl.constexpr,
    LOSSES: tl.constexpr,
    GRADIENTS: tl.constexpr,
):
    # Rows times their length may not fit into 32 bits.
    number = tl.program_id(0).to(tl.int64)
    row = logits + number * row_stride
    label = tl.load(target + number)
    ignored = label == ignore_index
    if LOSSES:
        known = (label >= 0) & (label < num_classes)
        own = tl.load(row + tl.where(known, label, 0)).to(tl.float32)
        log_sum = _log_sum(row, num_classes, width, BLOCK)
        log_sum = tl.where(known | ignored, log_sum, float("nan"))
        tl.store(log_sums + number, log_sum)
        tl.store(losses + number, tl.where(ignored, 0.0, log_sum - own))
        # All threads have read the target's logit before one overwrites it.
        tl.debug_barrier()
    else:
        log_sum = tl.load(log_sums + number)
    if GRADIENTS:
        factor = tl.where(ignored, 0.0, tl.load(scale))
        for first in range(0, width, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            softmax = tl.exp(_values(row, columns, num_classes, width) - log_sum)
            gradients = (softmax - (columns == label).to(tl.float32)) * factor
            gradients = tl.where(columns < num_classes, gradients, 0.0)
            tl.store(row + columns, rounded(gradients, row.dtype.element_ty), columns < width)


def losses_of_rows(
    logits: Tensor, target: Tensor, scale: Tensor | None, num_classes: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """See `pykern.kernels.cross_entropy.losses_of_rows`."""
    losses = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    log_sums = torch.empty(target.shape, dtype=torch.float32, device=logits.device)
    _launch(logits, target, losses, log_sums, scale, num_classes, ignore_index)
    return losses, log_sums


def gradients_of_rows(
    logits: Tensor,
    log_sums: Tensor,
    target: Tensor,
    scale: Tensor,
    num_classes: int,
    ignore_index: int,
) -> None:
    """See `pykern.kernels.cross_entropy.gradients_of_rows`."""
    _launch(logits, target, None, log_sums, scale, num_classes, ignore_index)


def _launch(
    logits: Tensor,
    target: Tensor,
    losses: Tensor | None,
    log_sums: Tensor,
    scale: Tensor | None,
    num_classes: int,
    ignore_index: int,
) -> None:
    num_rows, width = logits.shape
    if num_rows == 0:
        return
    if logits.stride(1) != 1:
        raise ValueError(
            f"logits must have adjacent columns, got strides {logits.stride()}. Use "
            "logits.contiguous()"
        )
    block = min(max(next_power_of_2(width), 32), _BLOCK)
    _kernel[num_rows,](
        logits,
        target.contiguous(),
        losses,
        log_sums.contiguous(),
        scale,
        num_classes,
        width,
        logits.stride(0),
        ignore_index,
        BLOCK=block,
        LOSSES=losses is not None,
        GRADIENTS=scale is not None,
        # Threads beyond the elements would have copies of them, and read what others overwrite.
        num_warps=min(block // 32, 4 if block <= 1024 else 8),
    )
