"""Activations in float64, and the terms that are added up for each result."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pykern.kernels import activation as twin


def exact(gradient: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> list[Tensor]:
    """Result, gradient of x, gradient of the bias or nothing, by torch in float64."""
    leaf = x.detach().double().requires_grad_()
    shift = None if bias is None else bias.double().requires_grad_()
    if kind in twin.GATED:
        gate, up = leaf.chunk(2, -1)
        after = F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh")
        result = after * up
    else:
        before = leaf if shift is None else leaf + shift
        result = F.gelu(before, approximate="none" if kind == "gelu" else "tanh")
    result.backward(gradient.double())
    gradients = [leaf.grad, *([] if shift is None else [shift.grad])]
    return [result.detach(), *(gradient for gradient in gradients if gradient is not None)]


def terms(gradient: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> list[Tensor]:
    """The terms that are added up for each of `exact`."""
    gradient, x = gradient.double().abs(), x.double().abs()
    if kind in twin.GATED:
        gate, up = x.chunk(2, -1)
        return [gate * up, torch.cat((gradient * up * (1 + gate), gradient * gate), -1)]
    size = x if bias is None else x + bias.double().abs()
    of_x = gradient * (1 + size)
    return [size, of_x, of_x.sum_to_size(x.shape[-1])]
