"""Activations on GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import GATED, Activation
from .blocks import cdiv, next_power_of_2
from .launching import launched
from .rounding import rounded
from .rows import as_rows, tile, tiles

# Elements of a program's tile, and its most columns: 16 bytes of bfloat16 for each thread.
_TILE = 2048
_COLUMNS = 256
# This many programs sum the gradient of a bias for each block of columns; then their sums add up.
_NUM_GROUPS = 64


@triton.jit
def _sigmoid(x):
    """The sigmoid and its derivative."""
    # The exponential of a negative number never overflows.
    small = tl.exp(-tl.abs(x))
    larger = 1 / (1 + small)
    return tl.where(x >= 0, larger, small * larger), small * larger * larger


@triton.jit
def activation_and_slope(x, KIND: tl.constexpr):
    """An activation of float32 and its derivative.

    Every multiplication and addition that a compiler could fuse is written as an explicit fma.
    Otherwise only one of two kernels might fuse it, and their results could differ in the last bit.
    """
    if KIND == "swiglu":
        share, slope = _sigmoid(x)
        return x * share, share + x * slope
    if KIND == "gelu":
        share = tl.fma(tl.erf(x * 0.7071067811865476), 0.5, 0.5)
        return x * share, share + x * tl.exp(x * x * -0.5) * 0.3989422804014327
    # (1 + tanh(t)) / 2 is the sigmoid of 2 t, and t = sqrt(2 / pi) (x + 0.044715 x^3).
    square = x * x
    share, slope = _sigmoid(x * tl.fma(square, 0.07135481627260025, 1.5957691216057308))
    inner = tl.fma(square, 0.21406444881780076, 1.5957691216057308)
    return x * share, share + x * slope * inner


@launched
@triton.jit
def _forward(
    x,
    bias,
    result,
    num_rows,
    num_columns,
    x_stride,
    KIND: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    first_row, first_column = tile(ROWS, COLUMNS)
    rows = first_row + tl.arange(0, ROWS)[:, None]
    columns = first_column + tl.arange(0, COLUMNS)[None, :]
    inside = (rows < num_rows) & (columns < num_columns)
    place = x + rows * x_stride + columns
    values = tl.load(place, inside).to(tl.float32)
    if BIAS:
        values += tl.load(bias + columns, columns < num_columns).to(tl.float32)
    product, _ = activation_and_slope(values, KIND)
    if GATE:
        product *= tl.load(place + num_columns, inside).to(tl.float32)
    tl.store(
        result + rows * num_columns + columns, rounded(product, result.dtype.element_ty), inside
    )


@launched
@triton.jit
def _backward(
    gradient,
    x,
    bias,
    of_x,
    of_bias,
    result,
    num_rows,
    num_columns,
    gradient_stride,
    x_stride,
    group_rows,
    KIND: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    AGAIN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Rows times their length may not fit into 32 bits. Columns may be many, so they use the first
    # dimension of the grid: other dimensions have 65535 programs at most.
    start = tl.program_id(1).to(tl.int64) * group_rows
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    exists = columns < num_columns
    if BIAS:
        shift = tl.load(bias + columns, exists).to(tl.float32)
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, group_rows, ROWS):
        rows = start + first + tl.arange(0, ROWS)[:, None]
        inside = (rows < num_rows) & exists
        coming = tl.load(gradient + rows * gradient_stride + columns, inside, 0).to(tl.float32)
        place = x + rows * x_stride + columns
        values = tl.load(place, inside, 0).to(tl.float32)
        if BIAS:
            values += shift
        product, slope = activation_and_slope(values, KIND)
        if GATE:
            factor = tl.load(place + num_columns, inside).to(tl.float32)
            out = of_x + rows * (2 * num_columns) + columns
            through = rounded(coming * product, of_x.dtype.element_ty)
            tl.store(out + num_columns, through, inside)
            coming *= factor
            product *= factor
        else:
            out = of_x + rows * num_columns + columns
        coming *= slope
        tl.store(out, rounded(coming, of_x.dtype.element_ty), inside)
        if BIAS:
            # Rows behind the last one have zero gradients.
            sums += coming
        if AGAIN:
            again = rounded(product, result.dtype.element_ty)
            tl.store(result + rows * num_columns + columns, again, inside)
    if BIAS:
        partial = tl.sum(sums, 0)[None, :]
        tl.store(of_bias + tl.program_id(1) * num_columns + columns, partial, exists)


def activated(x: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
    """See `pykern.kernels.activation.activated`."""
    gated = kind in GATED
    num_columns = x.shape[-1] // 2 if gated else x.shape[-1]
    result = torch.empty((*x.shape[:-1], num_columns), dtype=x.dtype, device=x.device)
    if result.numel() == 0:
        return result
    matrix = as_rows(x)
    num_rows = len(matrix)
    rows, columns = _size(num_columns)
    _forward[tiles(num_rows, num_columns, rows, columns)](
        matrix,
        bias if bias is None else bias.contiguous(),
        result,
        num_rows,
        num_columns,
        matrix.stride(0),
        KIND=kind,
        GATE=gated,
        BIAS=bias is not None,
        ROWS=rows,
        COLUMNS=columns,
        num_warps=4,
    )
    return result


def differentiated(
    gradient: Tensor, x: Tensor, bias: Tensor | None, kind: Activation, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `pykern.kernels.activation.differentiated`."""
    num_columns = gradient.shape[-1]
    of_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    result = torch.empty(gradient.shape if again else (0,), dtype=x.dtype, device=x.device)
    coming, matrix = as_rows(gradient), as_rows(x)
    num_rows = len(coming)
    rows, columns = _size(num_columns)
    num_groups, group_rows = _groups(num_rows, rows)
    shape = (0,) if bias is None else (num_groups, num_columns)
    partials = torch.empty(shape, dtype=torch.float32, device=x.device)
    if num_rows:
        _backward[(cdiv(num_columns, columns), num_groups)](
            coming,
            matrix,
            bias if bias is None else bias.contiguous(),
            of_x,
            partials,
            result,
            num_rows,
            num_columns,
            coming.stride(0),
            matrix.stride(0),
            group_rows,
            KIND=kind,
            GATE=kind in GATED,
            BIAS=bias is not None,
            AGAIN=again,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=4,
        )
    return of_x, partials if bias is None else partials.sum(0), result


def _size(num_columns: int) -> tuple[int, int]:
    """Rows and columns of a program's tile."""
    columns = min(next_power_of_2(num_columns), _COLUMNS)
    return _TILE // columns, columns


def _groups(num_rows: int, rows: int) -> tuple[int, int]:
    """The number of programs that share the rows, and the rows of each, in whole tiles."""
    group_rows = cdiv(cdiv(num_rows, rows), _NUM_GROUPS) * rows
    return (cdiv(num_rows, group_rows) if num_rows else 0), group_rows
