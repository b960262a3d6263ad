"""Tensors as matrices: the last dimension are columns, all other dimensions are rows."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .blocks import cdiv

# The most programs in any dimension of a grid but the first.
_MOST_PROGRAMS = 65535


@triton.jit
def tile(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first row, an int64, and the first column of a program's tile; see `tiles`."""
    # Rows times their length may not fit into 32 bits.
    number = tl.program_id(1).to(tl.int64) + tl.program_id(2) * tl.num_programs(1)
    return number * ROWS, tl.program_id(0) * COLUMNS


def tiles(
    num_rows: int, num_columns: int, tile_rows: int, tile_columns: int
) -> tuple[int, int, int]:
    """The grid of a kernel whose programs have tiles of a matrix, one after another along rows.

    A few programs may be superfluous: their rows lie behind the last one.
    """
    across, down = cdiv(num_columns, tile_columns), cdiv(num_rows, tile_rows)
    times = cdiv(down, _MOST_PROGRAMS)
    return across, cdiv(down, times), times


def as_rows(x: Tensor) -> Tensor:
    """A matrix of the same elements whose columns are adjacent.

    The matrix is a view if rows have equal distances, as in a padded tensor, otherwise a copy.
    """
    num_columns = x.shape[-1] if x.dim() else 1
    if x.dim() == 2 and (x.stride(1) == 1 or num_columns == 1):
        return x
    try:
        matrix = x.view(-1, num_columns) if num_columns else x.reshape(x.numel(), 0)
    except RuntimeError:
        matrix = x.reshape(-1, num_columns)
    return matrix if num_columns == 1 or matrix.stride(1) == 1 else matrix.contiguous()
