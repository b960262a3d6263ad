"""Dropout on GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..dropout import threshold
from .blocks import next_power_of_2
from .launching import launched
from .random import place_of, random_words, seed_of
from .rounding import rounded
from .rows import as_rows, tile, tiles

# Elements of a program.
_BLOCK = 2048


@launched
@triton.jit(do_not_specialize=["seed", "place", "threshold"])
def _kernel(
    x,
    result,
    seed: tl.int64,
    place,
    num_rows,
    num_columns,
    row_stride,
    scale,
    threshold: tl.uint32,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first_row, first = tile(ROWS, COLUMNS)
    rows = first_row + tl.arange(0, ROWS)[:, None]
    columns = first + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    values = tl.load(x + rows * row_stride + columns, inside).to(tl.float32)
    quads = first // 4 + tl.arange(0, COLUMNS // 4)[None, :]
    words = random_words(seed_of(seed, place), rows, quads, COLUMNS // 4)
    kept = words >= threshold
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
    columns = min(max(next_power_of_2(num_columns), 4), _BLOCK)
    rows = _BLOCK // columns
    _kernel[tiles(num_rows, num_columns, rows, columns)](
        matrix,
        result,
        seed,
        place_of(place, x.device),
        num_rows,
        num_columns,
        matrix.stride(0),
        1 / (1 - rate),
        threshold(rate),
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return result
