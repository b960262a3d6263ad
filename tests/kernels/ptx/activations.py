"""Activations as operations to execute."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pykern.kernels.activation import GATED, Activation
from pykern.kernels.gpu import activation, weighted_swiglu
from tests.kernels.activation_cases import exact, terms
from tests.kernels.ptx.outcome import Given, Operation, Outcome


def _arguments(given: Given, kind: Activation) -> tuple[Tensor, Tensor, Tensor | None]:
    gated = kind in GATED
    columns = given.shape.inner
    x = given.rows(columns * (2 if gated else 1), scale=3)
    return given.rows(columns), x, None if gated else given.row(columns)


def _forward(given: Given, *, kind: Activation) -> Outcome:
    gradient, x, bias = _arguments(given, kind)
    result = activation.activated(x, bias, kind)
    outcome = Outcome([x] if bias is None else [x, bias])
    outcome.near(result, exact(gradient, x, bias, kind)[0], terms(gradient, x, bias, kind)[0])
    return outcome


def _backward(given: Given, *, kind: Activation, again: bool) -> Outcome:
    gradient, x, bias = _arguments(given, kind)
    forward = activation.activated(x, bias, kind) if again else None
    of_x, of_bias, remade = activation.differentiated(gradient, x, bias, kind, again)
    expected, sums = exact(gradient, x, bias, kind), terms(gradient, x, bias, kind)
    outcome = Outcome([gradient, x] if bias is None else [gradient, x, bias])
    outcome.near(of_x, expected[1], sums[1], 12)
    if bias is not None:
        outcome.near(of_bias, expected[2], sums[2], 12)
    if forward is not None:
        outcome.same(remade, forward)
    return outcome


def _weighted(given: Given, *, backward: bool) -> Outcome:
    hidden, num_rows = given.shape.inner, given.shape.rows
    gate_up, gradient = given.rows(2 * hidden, scale=3), given.rows(hidden)
    weights, order = torch.rand(num_rows, 1), torch.randperm(num_rows).to(torch.int32)
    leaf, scales = gate_up.double().requires_grad_(), weights.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    result = F.silu(gate) * up * scales[order.long()]
    # An exponential of float32 is off by some roundings of its argument.
    steep = 2 + gate.detach().abs()
    if not backward:
        outcome = Outcome([gate_up, weights, order])
        product = weighted_swiglu.product(gate_up, weights, order)
        outcome.near(product, result, result.abs() * steep)
        return outcome
    of_gate_up, of_weights = torch.autograd.grad(result, (leaf, scales), gradient.double())
    actual = weighted_swiglu.product_gradient(gradient, gate_up, weights, order, False)
    slope = (gradient.double() * scales.detach()[order.long()]).abs() * steep
    outcome = Outcome([gradient, gate_up, weights, order])
    sizes = torch.cat((up.abs() * slope, gate.abs() * slope), dim=-1)
    outcome.near(actual[0], of_gate_up, sizes * 2)
    sums = torch.zeros(num_rows, 1, dtype=torch.float64)
    each = (gradient.double() * F.silu(gate) * up * steep).detach()
    sums[order.long()] = each.abs().sum(-1, keepdim=True)
    outcome.near(actual[1], of_weights, sums * 2)
    return outcome


OPERATIONS: dict[str, Operation] = {
    "swiglu": partial(_forward, kind="swiglu"),
    "geglu": partial(_forward, kind="geglu"),
    "gelu + bias": partial(_forward, kind="gelu"),
    "gelu_tanh + bias": partial(_forward, kind="gelu_tanh"),
    "swiglu backward": partial(_backward, kind="swiglu", again=False),
    "swiglu backward, product again": partial(_backward, kind="swiglu", again=True),
    "geglu backward": partial(_backward, kind="geglu", again=False),
    "gelu + bias backward": partial(_backward, kind="gelu", again=False),
    "gelu + bias backward, result again": partial(_backward, kind="gelu", again=True),
    "gelu_tanh + bias backward": partial(_backward, kind="gelu_tanh", again=False),
    "weighted swiglu": partial(_weighted, backward=False),
    "weighted swiglu backward": partial(_weighted, backward=True),
}
