"""Dropout on GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dropout import threshold
from .random import random_words, seed_of
from .rounding import rounded
from .rows import as_rows

# Elements of a program.
_BLOCK = 2048


@triton.jit(do_not_specialize=["seed"])
def _kernel(
    x,
    result,
    seed: tl.int64,
    place,
    num_rows,
    num_columns,
    row_stride,
    scale,
    threshold,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEED_IN_MEMORY: tl.constexpr,
):
    # Rows times their length may not fit into 32 bits.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    values = tl.load(x + rows * row_stride + columns, inside).to(tl.float32)
    quads = first // 4 + tl.arange(0, COLUMNS // 4)[None, :]
    words = random_words(seed_of(seed, place, SEED_IN_MEMORY), rows, quads, COLUMNS // 4)
    kept = words >= threshold.to(tl.uint32)
    masked = tl.where(kept, values * scale, 0.0)
    tl.store(
        result + rows * num_columns + columns, rounded(masked, result.dtype.element_ty), inside
    )


def masked(x: Tensor, rate: float, seed: int, place: Tensor | None) -> Tensor:
    """See `pykern.kernels.dropout.masked`."""
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if result.numel() == 0:
        return result
    matrix = as_rows(x)
    num_rows, num_columns = matrix.shape
    columns = min(max(triton.next_power_of_2(num_columns), 4), _BLOCK)
    rows = _BLOCK // columns
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(num_columns, columns))
    _kernel[grid](
        matrix,
        result,
        seed,
        place,
        num_rows,
        num_columns,
        matrix.stride(0),
        1 / (1 - rate),
        threshold(rate),
        ROWS=rows,
        COLUMNS=columns,
        SEED_IN_MEMORY=place is not None,
        num_warps=4,
    )
    return result
