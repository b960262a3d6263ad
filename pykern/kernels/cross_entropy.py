"""Cross entropy of rows of logits, whose gradient overwrites the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from .operation import define, wide


def losses_of_rows(
    logits: Tensor, target: Tensor, scale: Tensor | None, num_classes: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The loss of each row of logits; may overwrite the logits with its gradient.

    Args:
        logits: floating [rows, width]; columns from `num_classes` on are padding.
        target: int64 [rows].
        scale: float32 (float64 for float64) []: the gradient of each loss; gradients then overwrite
            the logits. None to keep the logits.
        num_classes: number of columns that count, at least 1.
        ignore_index: the target of rows that do not count. Their loss is 0.

    Returns:
        The losses and the logarithms of the rows' sums of exponentials, both float32 [rows]
        (float64 for float64). Elements are NaN where the target is not a class.
    """
    values = wide(logits[:, :num_classes])
    classes, known, ignored = _targets(target, num_classes, ignore_index)
    log_sums = torch.where(known | ignored, values.logsumexp(1), torch.nan)
    own = values.gather(1, classes[:, None])[:, 0]
    losses = torch.where(ignored, 0.0, log_sums - own)
    if scale is not None:
        gradients_of_rows(logits, log_sums, target, scale, num_classes, ignore_index)
    return losses, log_sums


def gradients_of_rows(
    logits: Tensor,
    log_sums: Tensor,
    target: Tensor,
    scale: Tensor,
    num_classes: int,
    ignore_index: int,
) -> None:
    """Overwrites logits with their gradient: (softmax - 1 at the target) * scale.

    The gradient is computed in float32 and rounded once. The arguments are as in `losses_of_rows`;
    `log_sums` are the logarithms that it returns.
    """
    inside = logits[:, :num_classes]
    classes, known, ignored = _targets(target, num_classes, ignore_index)
    # `values` is a new tensor, or the logits themselves if their dtype is wide enough.
    values = wide(inside).sub_(log_sums[:, None]).exp_()
    ones = known.to(values.dtype)[:, None]
    values.scatter_add_(1, classes[:, None], -ones)
    values.mul_(torch.where(ignored, 0.0, scale)[:, None])
    if values.dtype != logits.dtype:
        inside.copy_(values)
    logits[:, num_classes:].zero_()


def _targets(target: Tensor, num_classes: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """A class for each row, whether it is the target, and whether the row is ignored."""
    known = (target >= 0) & (target < num_classes)
    return torch.where(known, target, 0), known, target == ignore_index


losses = define(
    "cross_entropy_losses(Tensor(a!) logits, Tensor target, Tensor? scale, int num_classes,"
    " int ignore_index) -> (Tensor, Tensor)",
    losses_of_rows,
)
gradients = define(
    "cross_entropy_gradients(Tensor(a!) logits, Tensor log_sums, Tensor target, Tensor scale,"
    " int num_classes, int ignore_index) -> ()",
    gradients_of_rows,
)
