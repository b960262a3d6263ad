"""An activation fused with the linear layer behind it; the tensor between them is not saved.

The gradient of the linear layer's weight needs the activation's output again. The backward of the
activation reads the inputs of that output anyway, and recomputes it on the way, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import stash
from .activation import (
    GATED,
    Activation,
    Approximate,
    Gated,
    activate,
    activate_backward,
    check,
    gelu_kind,
)
from .handover import TwoParts, Weights
from .operation import multiplied_type


class _ActivationLinear(TwoParts):
    """The operation on (x, input bias, weight, bias, kind, level); ctx.dtype is the dtype of x."""

    weights = (1, 2, 3)

    @staticmethod
    def compute(ctx: Any, *arguments: Any) -> Tensor:
        x, input_bias, weight, bias, kind, level = arguments
        ctx.kind, ctx.dtype = kind, x.dtype
        product = activate(x, input_bias, kind)
        kept = product if level == "none" and ctx.needs_input_grad[2] else None
        ctx.save_for_backward(input_bias, weight, bias, kept, *stash.packed(x, level))
        operands = multiplied_type(x)
        return F.linear(
            product.to(operands),
            weight.to(operands),
            None if bias is None else bias.to(operands),
        )

    @staticmethod
    def gradients(ctx: Any, *gradients: Tensor) -> tuple[list[Tensor | None], Weights]:
        input_bias, weight, bias, product, *saved = ctx.saved_tensors
        (gradient,), needed = gradients, ctx.needs_input_grad
        again = needed[2] and product is None
        of_x, of_input_bias, remade = activate_backward(
            gradient @ weight.to(gradient.dtype),
            stash.unpacked(saved, ctx.dtype),
            input_bias,
            ctx.kind,
            again,
        )
        product = remade if again else product

        def weights() -> dict[int, Tensor]:
            rows = gradient.reshape(-1, gradient.shape[-1])
            found = {}
            if needed[1]:
                found[1] = of_input_bias.to(input_bias.dtype)
            if needed[2]:
                columns = product.to(rows.dtype).view(-1, product.shape[-1])
                found[2] = (rows.T @ columns).to(weight.dtype)
            if needed[3]:
                found[3] = rows.sum(0).to(bias.dtype)
            return found

        return [of_x, None, None, None, None, None], weights


def gated_linear(
    gate_up: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: Gated = "swiglu"
) -> Tensor:
    """A linear layer of silu(gate) * up, or gelu(gate) * up.

    The operation saves only `gate_up`: 2 * f numbers per row, at level ops+stash in 8 bits; at
    level none also the product, f numbers. Autocast casts the operands of the matrix product, as
    for nn.Linear.

    Args:
        gate_up: float32, bfloat16, float16 or float64, [..., 2 * f]: the gate, then up.
        weight: [out, f], of the type of `gate_up`; of any type under autocast.
        bias: [out], likewise; None for no bias.
        activation: "swiglu" or "geglu", as in `pykern.kernels.activation`.

    Returns:
        [..., out].

    Raises:
        ValueError: shapes or devices do not fit, or `activation` is unknown.
        TypeError: types do not fit.

    Paper: N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    if activation not in GATED:
        raise ValueError(f"activation must be one of {', '.join(GATED)}, got {activation!r}")
    return _activation_linear(gate_up, None, weight, bias, activation)


def gelu_linear(
    x: Tensor,
    input_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: Approximate = "none",
) -> Tensor:
    """A linear layer of gelu(x + input_bias).

    The operation saves only `x`: f numbers per row, at level ops+stash in 8 bits; at level none
    also the output of GELU, f numbers. Autocast casts the operands of the matrix product, as for
    nn.Linear.

    Args:
        x: float32, bfloat16, float16 or float64, [..., f].
        input_bias: floating, [f]; added in float32. None for no bias.
        weight: [out, f], of the type of `x`; of any type under autocast.
        bias: [out], likewise; None for no bias.
        approximate: the form of GELU, as in `pykern.kernels.activation.gelu`.

    Returns:
        [..., out].

    Raises:
        ValueError: shapes or devices do not fit, or `approximate` is unknown.
        TypeError: types do not fit.

    Paper: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016.
    """
    return _activation_linear(x, input_bias, weight, bias, gelu_kind(approximate))


def _activation_linear(
    x: Tensor, input_bias: Tensor | None, weight: Tensor, bias: Tensor | None, kind: Activation
) -> Tensor:
    check(x, input_bias, kind)
    width = x.shape[-1] // 2 if kind in GATED else x.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != width:
        raise ValueError(
            f"weight must have shape [outputs, {width}], the columns of {kind}, got "
            f"{list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias must have shape {list(weight.shape[:1])}, as weight says, got {list(bias.shape)}"
        )
    for parameter in (weight,) if bias is None else (weight, bias):
        if parameter.device != x.device:
            raise ValueError(
                f"weight and bias must be on {x.device} as x is, got {parameter.device}"
            )
        if parameter.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"weight and bias must be {x.dtype} as x is, got {parameter.dtype}. Convert them, "
                "or use torch.autocast"
            )
    arguments = x, input_bias, weight, bias, kind, stash.level()
    return _ActivationLinear.apply(*arguments)  # type: ignore[no-any-return,no-untyped-call]
