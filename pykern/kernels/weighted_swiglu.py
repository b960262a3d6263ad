"""SwiGLU of weighted rows: silu(gate) * up * weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .operation import define, wide


def product(gate_up: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The operation in plain torch, rounded once.

    Args:
        gate_up: floating [N, 2 * hidden], gate before up.
        weights: float32 or float64, of N elements in all.
        order: int32 [N]: the weight of row r is element `order[r]`.

    Returns:
        [N, hidden] as `gate_up`.
    """
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return (F.silu(gate) * up * _column(weights, order)).to(gate_up.dtype)


def product_gradient(
    gradient: Tensor, gate_up: Tensor, weights: Tensor, order: Tensor, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `gate_up` and of the weights, and the forward's product, bit for bit.

    Args:
        gradient: of the product, in its type.
        gate_up: as of `product`.
        weights: as of `product`.
        order: as of `product`, a permutation.
        again: whether the product is wanted.

    Returns:
        Gradients as `gate_up` and as `weights`; the result of `product`, empty if not wanted.
    """
    gate, up = wide(gate_up).chunk(2, dim=-1)
    silu, of_product = F.silu(gate), wide(gradient)
    of_weight = (of_product * silu * up).sum(-1)
    of_product = of_product * _column(weights, order)
    of_gate = torch.ops.aten.silu_backward(of_product * up, gate)
    of_up = of_product * silu
    of_weights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    of_weights.view(-1).scatter_(0, order.long(), of_weight.to(weights.dtype))
    of_gate_up = torch.cat((of_gate, of_up), dim=-1).to(gate_up.dtype)
    remade = product(gate_up, weights, order) if again else gate_up.new_empty(0)
    return of_gate_up, of_weights, remade


def _column(weights: Tensor, order: Tensor) -> Tensor:
    return weights.reshape(-1).index_select(0, order)[:, None]


weighted_swiglu = define(
    "weighted_swiglu(Tensor gate_up, Tensor weights, Tensor order) -> Tensor", product
)
weighted_swiglu_gradient = define(
    "weighted_swiglu_gradient(Tensor gradient, Tensor gate_up, Tensor weights, Tensor order,"
    " bool again) -> (Tensor, Tensor, Tensor)",
    product_gradient,
)
