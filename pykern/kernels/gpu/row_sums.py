"""Sums of rows on GPUs: each program gathers the rows of one result, in the order of places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import cdiv, next_power_of_2
from .launching import launched
from .rounding import rounded
from .rows import as_rows

# Columns of a program.
_BLOCK = 1024


@launched
@triton.jit
def _kernel(
    rows, places, result, width, row_stride, NUM_TERMS: tl.constexpr, COLUMNS: tl.constexpr
):
    # Rows times their length may not fit into 32 bits.
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for term in range(NUM_TERMS):
        row = tl.load(places + token * NUM_TERMS + term).to(tl.int64)
        total += tl.load(rows + row * row_stride + columns, inside, 0.0).to(tl.float32)
    tl.store(result + token * width + columns, rounded(total, result.dtype.element_ty), inside)


def summed(rows: Tensor, places: Tensor) -> Tensor:
    """See `pykern.kernels.row_sums.summed`."""
    matrix = as_rows(rows)
    num_tokens, num_terms = places.shape
    width = matrix.shape[1]
    result = torch.empty((num_tokens, width), dtype=rows.dtype, device=rows.device)
    if result.numel() == 0:
        return result
    columns = min(next_power_of_2(width), _BLOCK)
    _kernel[(num_tokens, cdiv(width, columns))](
        matrix,
        places.contiguous(),
        result,
        width,
        matrix.stride(0),
        NUM_TERMS=num_terms,
        COLUMNS=columns,
        num_warps=4,
    )
    return result
