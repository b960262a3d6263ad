"""Products of rows with the matrix of their group, if only the device knows the groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def times(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each row times the matrix of its group.

    Args:
        rows: floating [N, a], adjacent columns.
        matrices: of that type [groups, a, b], or a transposed view of [groups, b, a].
        ends: int32 [groups]; the rows of group g end before row `ends[g]`.

    Returns:
        [N, b] of that type.
    """
    if not len(rows):
        return rows.new_zeros((0, matrices.shape[2]))
    if _native(rows):
        return F.grouped_mm(rows, matrices, offs=ends)
    result = rows.new_zeros((len(rows), matrices.shape[2]))
    for matrix, member in zip(matrices, _members(rows, ends), strict=True):
        result = torch.where(member, rows @ matrix, result)
    return result


def outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """For each group, the sum over its rows of the outer products of left and right.

    Args:
        left: floating [N, a], adjacent columns.
        right: of that type [N, b], adjacent columns.
        ends: as for `times`.

    Returns:
        [groups, a, b] of that type; zero where a group has no rows.
    """
    if not len(left):
        return left.new_zeros((len(ends), left.shape[1], right.shape[1]))
    if _native(left):
        return F.grouped_mm(left.t(), right, offs=ends)
    # A product with zero would not do: NaN of one group must not reach another.
    members = _members(left, ends)
    return torch.stack(
        [torch.where(m, left, 0.0).t() @ torch.where(m, right, 0.0) for m in members]
    )


def _native(rows: Tensor) -> bool:
    """Whether torch's grouped product supports the rows without copying `ends` to the host.

    On a GPU without kernels for it, torch copies `ends` to the host. float64 is not supported.
    """
    if rows.untyped_storage().device.type == "meta":
        # A meta tensor needs only sizes, and torch's own function supports only bfloat16 there.
        return False
    if rows.is_cuda:
        capability = torch.cuda.get_device_capability(rows.device)
        return rows.dtype is torch.bfloat16 and capability[0] in (9, 10)
    return rows.dtype is not torch.float64


def _members(rows: Tensor, ends: Tensor) -> list[Tensor]:
    """For each group, the mask of its rows: bool [N, 1]."""
    numbers = torch.arange(len(rows), device=rows.device)
    groups = torch.searchsorted(ends, numbers, right=True, out_int32=True)[:, None]
    return [groups == group for group in range(len(ends))]
