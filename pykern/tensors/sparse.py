"""Sparse tensors, whose values are in other tensors: they have no storage of their own."""

from __future__ import annotations

import torch
from torch import Tensor

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors that hold the indices and values of a sparse tensor; any other tensor itself."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if layout in _BY_COLUMNS:
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return (tensor,)


def all_bytes(tensor: Tensor) -> int:
    """The bytes of all values; of a sparse tensor, of those that it holds and of their indices."""
    return sum(part.nbytes for part in dense_parts(tensor))


def are_equal(one: Tensor, other: Tensor) -> bool:
    """As `torch.equal`, which takes no sparse tensors."""
    if one.layout is not other.layout:
        return False
    return all(map(torch.equal, dense_parts(one), dense_parts(other)))
