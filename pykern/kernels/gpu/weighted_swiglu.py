"""SwiGLU of weighted rows on GPUs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import activation_and_slope
from .blocks import cdiv, next_power_of_2
from .launching import launched
from .rounding import rounded
from .rows import as_rows

# Columns of the product that a program computes at a time.
_BLOCK = 1024


@launched
@triton.jit
def _product(gate_up, weights, order, result, hidden, row_stride, COLUMNS: tl.constexpr):
    # Rows times their length may not fit into 32 bits.
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < hidden
    weight = tl.load(weights + tl.load(order + row)).to(tl.float32)
    gate = tl.load(gate_up + row * row_stride + columns, inside).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + hidden + columns, inside).to(tl.float32)
    silu, _ = activation_and_slope(gate, "swiglu")
    values = rounded(silu * up * weight, result.dtype.element_ty)
    tl.store(result + row * hidden + columns, values, inside)


@launched
@triton.jit
def _gradients(
    gradient,
    gate_up,
    weights,
    order,
    of_gate_up,
    of_weights,
    result,
    hidden,
    gradient_stride,
    row_stride,
    AGAIN: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    choice = tl.load(order + row)
    weight = tl.load(weights + choice).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for begin in range(0, hidden, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        inside = columns < hidden
        gate = tl.load(gate_up + row * row_stride + columns, inside, 0.0).to(tl.float32)
        up = tl.load(gate_up + row * row_stride + hidden + columns, inside, 0.0).to(tl.float32)
        of_product = tl.load(gradient + row * gradient_stride + columns, inside, 0.0).to(tl.float32)
        silu, slope = activation_and_slope(gate, "swiglu")
        total += of_product * silu * up
        of_product *= weight
        of_gate = of_product * up * slope
        of_up = of_product * silu
        here = of_gate_up + row * 2 * hidden + columns
        tl.store(here, rounded(of_gate, of_gate_up.dtype.element_ty), inside)
        tl.store(here + hidden, rounded(of_up, of_gate_up.dtype.element_ty), inside)
        if AGAIN:
            # Products alone cannot be fused, so the bits are as in the forward.
            values = rounded(silu * up * weight, result.dtype.element_ty)
            tl.store(result + row * hidden + columns, values, inside)
    tl.store(of_weights + choice, tl.sum(total, axis=0))


def product(gate_up: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """See `pykern.kernels.weighted_swiglu.product`."""
    matrix = as_rows(gate_up)
    num_rows, hidden = matrix.shape[0], matrix.shape[1] // 2
    result = torch.empty((num_rows, hidden), dtype=gate_up.dtype, device=gate_up.device)
    if result.numel() == 0:
        return result
    columns = min(next_power_of_2(hidden), _BLOCK)
    _product[(num_rows, cdiv(hidden, columns))](
        matrix,
        weights.contiguous(),
        order,
        result,
        hidden,
        matrix.stride(0),
        COLUMNS=columns,
        num_warps=4,
    )
    return result


def product_gradient(
    gradient: Tensor, gate_up: Tensor, weights: Tensor, order: Tensor, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `pykern.kernels.weighted_swiglu.product_gradient`."""
    gradient, matrix = as_rows(gradient), as_rows(gate_up)
    num_rows, hidden = gradient.shape
    dtype, device = gate_up.dtype, gate_up.device
    of_gate_up = torch.empty((num_rows, 2 * hidden), dtype=dtype, device=device)
    shape = (num_rows, hidden) if again else (0,)
    result = torch.empty(shape, dtype=dtype, device=device)
    of_weights = torch.empty(weights.shape, dtype=weights.dtype, device=device)
    if num_rows == 0:
        return of_gate_up, of_weights, result
    _gradients[(num_rows,)](
        gradient,
        matrix,
        weights.contiguous(),
        order,
        of_gate_up,
        of_weights,
        result,
        hidden,
        gradient.stride(0),
        matrix.stride(0),
        AGAIN=again,
        COLUMNS=min(next_power_of_2(hidden), _BLOCK),
        num_warps=4,
    )
    return of_gate_up, of_weights, result
