"""Sums of rows of a matrix, a fixed number for each result. A gather needs no atomics."""

from __future__ import annotations

from torch import Tensor

from .operation import define, wide


def summed(rows: Tensor, places: Tensor) -> Tensor:
    """The operation in plain torch: sums in float32, rounded once.

    Args:
        rows: floating [N, width].
        places: int32 [T, num_terms], each 0 <= place < N.

    Returns:
        [T, width] as `rows`: element t is the sum of the rows at `places[t]`.
    """
    terms = rows.index_select(0, places.reshape(-1)).unflatten(0, places.shape)
    return wide(terms).sum(1).to(rows.dtype)


row_sums = define("row_sums(Tensor rows, Tensor places) -> Tensor", summed)
