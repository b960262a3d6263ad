"""Tensors as matrices: the last dimension are columns, all others together are rows."""

from __future__ import annotations

from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """A matrix of the same elements whose columns are adjacent.

    It is a view where rows are equally far apart, as those of a padded tensor are, else a copy.
    """
    num_columns = x.shape[-1] if x.dim() else 1
    if x.dim() == 2 and (x.stride(1) == 1 or num_columns == 1):
        return x
    try:
        matrix = x.view(-1, num_columns) if num_columns else x.reshape(x.numel(), 0)
    except RuntimeError:
        matrix = x.reshape(-1, num_columns)
    return matrix if num_columns == 1 or matrix.stride(1) == 1 else matrix.contiguous()
