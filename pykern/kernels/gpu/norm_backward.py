"""Triton kernels of the backward of norms."""

from __future__ import annotations

import triton
import triton.language as tl

from .launching import launched
from .norm_forward import normal, scaled
from .rounding import rounded


@launched
@triton.jit
def sums(
    gradient,
    total,
    weight,
    rstd,
    mean,
    result,
    num_columns,
    gradient_stride,
    total_stride,
    CENTRED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The two sums that the gradient of a row depends on, for a row longer than a block."""
    # Rows times their length may not fit into 32 bits.
    row = tl.program_id(0).to(tl.int64)
    deviation = tl.load(rstd + row)
    average = tl.load(mean + row) if CENTRED else 0.0
    slope = tl.zeros((COLUMNS,), tl.float32)
    offset = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, num_columns, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < num_columns
        values = tl.load(total + row * total_stride + columns, inside, 0).to(tl.float32)
        incoming = tl.load(gradient + row * gradient_stride + columns, inside, 0).to(tl.float32)
        incoming *= tl.load(weight + columns, inside, 0).to(tl.float32)
        slope += incoming * normal(values, average, deviation, CENTRED)
        offset += incoming
    tl.store(result + 2 * row, tl.sum(slope))
    tl.store(result + 2 * row + 1, tl.sum(offset))


@triton.jit
def _of_normal(incoming, x, sums, rows, valid, num_columns, CENTRED: tl.constexpr):
    """The gradient of the sum, times the deviation; x is normal. Whole rows need no `sums`."""
    if sums is None:
        slope = tl.sum(incoming * x, 1, keep_dims=True)
        offset = tl.sum(incoming, 1, keep_dims=True)
    else:
        slope = tl.load(sums + 2 * rows, valid, 0)
        offset = tl.load(sums + 2 * rows + 1, valid, 0)
    result = incoming - x * (slope / num_columns)
    if CENTRED:
        result -= offset / num_columns
    return result


@launched
@triton.jit
def backward(
    gradient,
    residual,
    total,
    weight,
    bias,
    rstd,
    mean,
    sums,
    of_total,
    normed,
    parts,
    num_rows,
    num_columns,
    tiles_each,
    gradient_stride,
    residual_stride,
    total_stride,
    CENTRED: tl.constexpr,
    AGAIN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradients of some rows, or of some columns of rows whose `sums` are given.

    A program goes through `tiles_each` tiles, and adds up its part of the gradients of weights.
    """
    part = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    in_row = columns < num_columns
    weights = tl.load(weight + columns, in_row, 0).to(tl.float32)
    biases = None if bias is None else tl.load(bias + columns, in_row, 0).to(tl.float32)
    of_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    of_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    for tile in range(tiles_each):
        rows = (part * tiles_each + tile) * ROWS + tl.arange(0, ROWS)[:, None]
        valid = rows < num_rows
        inside = valid & in_row
        deviation = tl.load(rstd + rows, valid, 0)
        average = tl.load(mean + rows, valid, 0) if CENTRED else tl.zeros((ROWS, 1), tl.float32)
        x = tl.load(total + rows * total_stride + columns, inside, 0).to(tl.float32)
        x = normal(x, average, deviation, CENTRED)
        incoming = tl.load(gradient + rows * gradient_stride + columns, inside, 0).to(tl.float32)
        places = rows * num_columns + columns
        if AGAIN:
            result = rounded(scaled(x, weights, biases), normed.dtype.element_ty)
            tl.store(normed + places, result, inside)
        # Beyond the end of a row, x is not zero, but the incoming gradient is.
        of_weight += incoming * x
        if bias is not None:
            of_bias += incoming
        result = deviation * _of_normal(
            incoming * weights, x, sums, rows, valid, num_columns, CENTRED
        )
        if residual is not None:
            more = tl.load(residual + rows * residual_stride + columns, inside, 0)
            result += more.to(tl.float32)
        tl.store(of_total + places, rounded(result, of_total.dtype.element_ty), inside)
    place = part * num_columns + columns
    tl.store(parts + place, tl.sum(of_weight, 0, keep_dims=True), in_row)
    if bias is not None:
        place += tl.num_programs(0) * num_columns
        tl.store(parts + place, tl.sum(of_bias, 0, keep_dims=True), in_row)


@launched
@triton.jit
def add_parts(parts, result, num_parts, num_columns, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds up the parts of `backward`'s programs, in an order that only depends on the shape."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tensor = tl.program_id(1)
    in_row = columns < num_columns
    added = tl.zeros((PARTS, COLUMNS), tl.float32)
    for first in range(0, num_parts, PARTS):
        rows = first + tl.arange(0, PARTS)[:, None]
        place = (tensor * num_parts + rows).to(tl.int64) * num_columns + columns
        added += tl.load(parts + place, (rows < num_parts) & in_row, 0)
    tl.store(result + tensor * num_columns + columns, tl.sum(added, 0, keep_dims=True), in_row)
