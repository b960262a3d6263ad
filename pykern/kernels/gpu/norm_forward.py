"""Triton kernels of the forward of norms; the backward reuses some to recompute bit for bit."""

from __future__ import annotations

import triton
import triton.language as tl

from .launching import launched
from .random import random_words, seed_of
from .rounding import rounded


@triton.jit
def normal(x, mean, rstd, CENTRED: tl.constexpr):
    """Normalises a block by its mean and 1 / deviation, before the weight."""
    if CENTRED:
        x = x - mean
    return x * rstd


@triton.jit
def scaled(x, weight, bias):
    """Applies the weight and the bias, if any; explicit fma leaves the compiler no choice."""
    if bias is None:
        x *= weight
    else:
        x = tl.fma(x, weight, bias)
    return x


@triton.jit(do_not_specialize=["seed", "place", "threshold"])
def _sum(
    x,
    delta,
    added,
    seed: tl.int64,
    place,
    rows,
    first,
    inside,
    num_columns,
    x_stride,
    delta_stride,
    scale,
    threshold: tl.uint32,
    DROPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some columns of the sum in float32, rounded as the stored sum."""
    columns = first + tl.arange(0, COLUMNS)[None, :]
    values = tl.load(x + rows * x_stride + columns, inside, 0).to(tl.float32)
    if delta is not None:
        terms = tl.load(delta + rows * delta_stride + columns, inside, 0).to(tl.float32)
        if DROPS:
            quads = first // 4 + tl.arange(0, COLUMNS // 4)[None, :]
            words = random_words(seed_of(seed, place), rows, quads, COLUMNS // 4)
            terms = tl.where(words >= threshold, terms * scale, 0.0)
        total = rounded(values + terms, added.dtype.element_ty)
        tl.store(added + rows * num_columns + columns, total, inside)
        values = total.to(tl.float32)
    return values


@launched
@triton.jit(do_not_specialize=["seed", "place", "threshold"])
def statistics(
    x,
    delta,
    added,
    seed: tl.int64,
    place,
    num_columns,
    x_stride,
    delta_stride,
    scale,
    threshold: tl.uint32,
    rstd,
    mean,
    eps,
    CENTRED: tl.constexpr,
    DROPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds up one row that is longer than a block, and computes its mean and 1 / deviation."""
    # Rows times their length may not fit into 32 bits.
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    average = tl.zeros((1, 1), tl.float32)
    squares = tl.zeros((1, 1), tl.float32)
    for first in range(0, num_columns, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)[None, :]
        inside = columns < num_columns
        total = _sum(
            x,
            delta,
            added,
            seed,
            place,
            row,
            first,
            inside,
            num_columns,
            x_stride,
            delta_stride,
            scale,
            threshold,
            DROPS,
            COLUMNS,
        )
        if CENTRED:
            # Chan, Golub and LeVeque: squares around the mean so far, and around the block's mean.
            number = tl.minimum(num_columns - first, COLUMNS).to(tl.float32)
            block = tl.sum(total, 1, keep_dims=True) / number
            away = block - average
            share = number / (first + number)
            average += away * share
            squares += away * away * first * share
            total = tl.where(inside, total - block, 0.0)
        squares += tl.sum(total * total, 1, keep_dims=True)
    tl.store(rstd + row, tl.rsqrt(squares / num_columns + eps))
    if CENTRED:
        tl.store(mean + row, average)


@triton.jit
def _moments(
    total,
    rstd,
    mean,
    rows,
    valid,
    in_row,
    num_columns,
    eps,
    CENTRED: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The mean (0 for RMSNorm) and 1 / deviation: computed and stored, or loaded."""
    average = tl.zeros((total.shape[0], 1), tl.float32)
    if WHOLE:
        if CENTRED:
            average = tl.sum(total, 1, keep_dims=True) / num_columns
            tl.store(mean + rows, average, valid)
            total = tl.where(in_row, total - average, 0.0)
        deviation = tl.rsqrt(tl.sum(total * total, 1, keep_dims=True) / num_columns + eps)
        tl.store(rstd + rows, deviation, valid)
    else:
        deviation = tl.load(rstd + rows, valid, 0)
        if CENTRED:
            average = tl.load(mean + rows, valid, 0)
    return average, deviation


@launched
@triton.jit(do_not_specialize=["seed", "place", "threshold"])
def forward(
    x,
    delta,
    added,
    seed: tl.int64,
    place,
    num_rows,
    num_columns,
    x_stride,
    delta_stride,
    scale,
    threshold: tl.uint32,
    weight,
    bias,
    normed,
    rstd,
    mean,
    eps,
    CENTRED: tl.constexpr,
    DROPS: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds and normalises some rows; or some columns of sums whose statistics are known."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    first = tl.program_id(1) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)[None, :]
    valid, in_row = rows < num_rows, columns < num_columns
    total = _sum(
        x,
        delta,
        added,
        seed,
        place,
        rows,
        first,
        valid & in_row,
        num_columns,
        x_stride,
        delta_stride,
        scale,
        threshold,
        DROPS,
        COLUMNS,
    )
    average, deviation = _moments(
        total, rstd, mean, rows, valid, in_row, num_columns, eps, CENTRED, WHOLE
    )
    result = scaled(
        normal(total, average, deviation, CENTRED),
        tl.load(weight + columns, in_row, 0).to(tl.float32),
        None if bias is None else tl.load(bias + columns, in_row, 0).to(tl.float32),
    )
    tl.store(
        normed + rows * num_columns + columns,
        rounded(result, normed.dtype.element_ty),
        valid & in_row,
    )
