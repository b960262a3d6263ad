"""Tensors in 8 bits on GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..stash import BLOCK, CODES, SMALLEST, StashForm
from .blocks import cdiv, next_power_of_2
from .launching import launched
from .rounding import INTERPRETED, rounded
from .rows import as_rows

# Elements of a program, and its most columns.
_TILE = 4096
_COLUMNS = 4096
# The first compute capability whose processors round to e4m3.
_E4M3_SINCE = (8, 9)
# This constant plus a small number has the nearest integer in its lowest bits, ties to even.
_TO_INTEGER = tl.constexpr(1.5 * 2**23)


@launched
@triton.jit
def _quantise(
    x,
    codes,
    scales,
    num_rows,
    num_columns,
    num_blocks,
    row_stride,
    largest,
    SMALLEST: tl.constexpr,
    INTEGER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Rows times their length may not fit into 32 bits.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * BLOCKS * BLOCK + tl.arange(0, BLOCKS * BLOCK)[None, :]
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    values = tl.load(x + rows * row_stride + columns, inside, 0).to(tl.float32)
    finite = tl.abs(values) < float("inf")
    sizes = tl.where(finite, tl.abs(values), float("inf"))
    magnitude = tl.max(sizes.reshape(ROWS, BLOCKS, BLOCK), 2)
    whole = magnitude < float("inf")
    used = whole & (magnitude >= SMALLEST)
    some = tl.where(used, magnitude, 1.0)
    inverse = tl.where(used, tl.div_rn(largest, some), 0.0)
    scale = tl.where(used, tl.div_rn(some, largest), 0.0)
    scale = tl.where(whole, scale, float("nan"))
    held = (rows < num_rows) & (blocks < num_blocks)
    tl.store(scales + rows * num_blocks + blocks, scale, held)
    values = tl.where(finite, values, 0.0).reshape(ROWS, BLOCKS, BLOCK) * inverse[:, :, None]
    values = values.reshape(ROWS, BLOCKS * BLOCK)
    if INTEGER:
        result = (values + _TO_INTEGER).to(tl.int32, bitcast=True).to(tl.int8)
    else:
        result = values.to(codes.dtype.element_ty)
    tl.store(codes + rows * num_columns + columns, result, inside)


@launched
@triton.jit
def _restore(
    codes,
    scales,
    result,
    num_rows,
    num_columns,
    num_blocks,
    codes_stride,
    scales_stride,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.program_id(1) * BLOCKS * BLOCK + tl.arange(0, BLOCKS * BLOCK)[None, :]
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    held = (rows < num_rows) & (blocks < num_blocks)
    values = tl.load(codes + rows * codes_stride + columns, inside).to(tl.float32)
    scale = tl.load(scales + rows * scales_stride + blocks, held)
    values = values.reshape(ROWS, BLOCKS, BLOCK) * scale[:, :, None]
    values = values.reshape(ROWS, BLOCKS * BLOCK)
    tl.store(
        result + rows * num_columns + columns, rounded(values, result.dtype.element_ty), inside
    )


def quantised(x: Tensor, form: StashForm) -> tuple[Tensor, Tensor]:
    """See `pykern.kernels.stash.quantised`."""
    dtype, largest = CODES[form]
    if form == "e4m3":
        _require_e4m3(x.device)
    num_columns = x.shape[-1]
    num_blocks = cdiv(num_columns, BLOCK)
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty((*x.shape[:-1], num_blocks), dtype=torch.float32, device=x.device)
    if codes.numel():
        matrix = as_rows(x)
        grid, rows, blocks = _tiles(len(matrix), num_blocks)
        _quantise[grid](
            matrix,
            codes,
            scales,
            len(matrix),
            num_columns,
            num_blocks,
            matrix.stride(0),
            largest,
            SMALLEST=SMALLEST,
            INTEGER=form == "int8",
            ROWS=rows,
            BLOCKS=blocks,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return codes, scales


def _require_e4m3(device: torch.device) -> None:
    """Raises NotImplementedError where numbers in e4m3 cannot be made."""
    if INTERPRETED:
        raise NotImplementedError(
            "form must be int8 in Triton's interpreter, which rounds to e4m3 wrong, got e4m3. Use "
            "a GPU for e4m3"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _E4M3_SINCE:
        name = torch.cuda.get_device_name(device)
        raise NotImplementedError(
            f"form must be int8 on GPUs before compute capability 8.9, got e4m3 on {name}. Use int8"
        )


def restored(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """See `pykern.kernels.stash.restored`."""
    result = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if result.numel():
        matrix, factors = as_rows(codes), as_rows(scales)
        grid, rows, blocks = _tiles(len(matrix), factors.shape[1])
        _restore[grid](
            matrix,
            factors,
            result,
            len(matrix),
            codes.shape[-1],
            factors.shape[1],
            matrix.stride(0),
            factors.stride(0),
            ROWS=rows,
            BLOCKS=blocks,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return result


def _tiles(num_rows: int, num_blocks: int) -> tuple[tuple[int, int], int, int]:
    """The grid of programs, and the rows and blocks of each program."""
    blocks = min(next_power_of_2(num_blocks), _COLUMNS // BLOCK)
    rows = _TILE // (blocks * BLOCK)
    return (cdiv(num_rows, rows), cdiv(num_blocks, blocks)), rows, blocks
