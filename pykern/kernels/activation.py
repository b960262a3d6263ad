"""Activations of transformers' feed-forward layers: SwiGLU, GeGLU and GELU with a bias."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from . import stash
from .handover import TwoParts, Weights
from .levels import KernelLevel
from .operation import define, wide

# Gated kinds multiply an activation of the first half of the columns by the second half.
Gated = Literal["swiglu", "geglu"]
GATED: tuple[Gated, ...] = get_args(Gated)
# The form of GELU: with the error function, as nn.GELU(), or with the hyperbolic tangent.
Approximate = Literal["none", "tanh"]
APPROXIMATES: tuple[Approximate, ...] = get_args(Approximate)
Activation = Literal["swiglu", "geglu", "gelu", "gelu_tanh"]


def activated(x: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
    """The operation in plain torch, in float32 until its result is rounded.

    Args:
        x: floating, of any shape.
        bias: floating, added to each row of `x`; None for no bias, and for gated kinds.
        kind: the activation.

    Returns:
        The result in the dtype of `x`, contiguous; gated kinds have half of its columns.
    """
    before, factor = _parts(x, bias, kind)
    after = _forward(before, kind)
    return (after if factor is None else after.mul_(factor)).to(x.dtype)


def differentiated(
    gradient: Tensor, x: Tensor, bias: Tensor | None, kind: Activation, again: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `activated`, in plain torch.

    Args:
        gradient: floating, of the shape of `activated`'s result.
        x: as in the forward.
        bias: as in the forward.
        kind: as in the forward.
        again: whether to return the result of `activated` again, with the same bits.

    Returns:
        The gradient of `x` in its dtype and shape, contiguous; the gradient of the bias in float32
        or float64, empty without a bias; the result of `activated`, empty if not wanted.
    """
    before, factor = _parts(x, bias, kind)
    gradient = gradient.to(before.dtype)
    after = _forward(before, kind) if again or factor is not None else x.new_empty(0)
    if factor is None:
        of_x = _backward(gradient.contiguous(), before, kind)
    else:
        of_gate = _backward(gradient * factor, before, kind)
        of_x = torch.cat((of_gate, gradient * after), -1)
        after = after.mul_(factor) if again else x.new_empty(0)
    # A single row is its own sum, but the results of an operation must not share memory.
    of_bias = before.new_empty(0) if bias is None else of_x.sum_to_size(bias.shape).clone()
    return of_x.to(x.dtype), of_bias, after.to(x.dtype)


def _parts(x: Tensor, bias: Tensor | None, kind: Activation) -> tuple[Tensor, Tensor | None]:
    """The argument of the activation, and the factor of its result, if any."""
    if kind in GATED:
        half = x.shape[-1] // 2
        values = wide(x.contiguous())
        return values[..., :half], values[..., half:]
    values = wide(x.contiguous())
    return (values if bias is None else values + bias.to(values.dtype)), None


def _forward(x: Tensor, kind: Activation) -> Tensor:
    return F.silu(x) if kind == "swiglu" else F.gelu(x, approximate=_form(kind))


def _backward(gradient: Tensor, x: Tensor, kind: Activation) -> Tensor:
    if kind == "swiglu":
        return torch.ops.aten.silu_backward(gradient, x)  # type: ignore[no-any-return]
    return torch.ops.aten.gelu_backward(gradient, x, approximate=_form(kind))  # type: ignore[no-any-return]


def _form(kind: Activation) -> Approximate:
    return "none" if kind == "gelu" else "tanh"


activate = define("activate(Tensor x, Tensor? bias, str kind) -> Tensor", activated)
activate_backward = define(
    "activate_backward(Tensor gradient, Tensor x, Tensor? bias, str kind, bool again)"
    " -> (Tensor, Tensor, Tensor)",
    differentiated,
)


class _Activation(TwoParts):
    weights = (1,)

    @staticmethod
    def compute(
        ctx: Any, x: Tensor, bias: Tensor | None, kind: Activation, level: KernelLevel
    ) -> Tensor:
        ctx.kind, ctx.dtype = kind, x.dtype
        ctx.save_for_backward(bias, *stash.packed(x, level))
        return activate(x, bias, kind)  # type: ignore[no-any-return]

    @staticmethod
    def gradients(ctx: Any, *gradients: Tensor) -> tuple[list[Tensor | None], Weights]:
        bias, *saved = ctx.saved_tensors
        x = stash.unpacked(saved, ctx.dtype)
        of_x, of_bias, _ = activate_backward(gradients[0], x, bias, ctx.kind, False)
        return [of_x, None, None, None], lambda: {1: of_bias.to(bias.dtype)}


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: the activation of Llama, Mistral and Qwen.

    Args:
        gate_up: float32, bfloat16, float16 or float64, [..., 2 * f]: the gate, then up.

    Returns:
        [..., f], of the same type; rounded once from float32.

    Raises:
        ValueError: the number of columns is odd or 0.
        TypeError: `gate_up` is not floating.

    Paper: N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    check(gate_up, None, "swiglu")
    return _Activation.apply(gate_up, None, "swiglu", stash.level())  # type: ignore[no-any-return,no-untyped-call]


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with GELU in its tanh form: the activation of Gemma and T5 1.1.

    Args:
        gate_up: float32, bfloat16, float16 or float64, [..., 2 * f]: the gate, then up.

    Returns:
        [..., f], of the same type; rounded once from float32.

    Raises:
        ValueError: the number of columns is odd or 0.
        TypeError: `gate_up` is not floating.

    Paper: N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    check(gate_up, None, "geglu")
    return _Activation.apply(gate_up, None, "geglu", stash.level())  # type: ignore[no-any-return,no-untyped-call]


def gelu(x: Tensor, bias: Tensor | None = None, *, approximate: Approximate = "none") -> Tensor:
    """GELU of y = x + bias: y times the standard normal distribution function of y.

    Args:
        x: float32, bfloat16, float16 or float64, [..., f].
        bias: floating, [f]; added in float32. None for no bias.
        approximate: "none" is the exact form, with the error function: nn.GELU(), BERT, GPT-NeoX.
            "tanh" approximates it: GPT-2, GPT-J.

    Returns:
        As `x`, contiguous; rounded once from float32.

    Raises:
        ValueError: `x` has no columns, the bias does not have the shape of a row or is on another
            device, or `approximate` is unknown.
        TypeError: `x` or the bias is not floating.

    Paper: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016.
    """
    kind = gelu_kind(approximate)
    check(x, bias, kind)
    return _Activation.apply(x, bias, kind, stash.level())  # type: ignore[no-any-return,no-untyped-call]


def gelu_kind(approximate: Approximate) -> Activation:
    """The kind of activation for a form of GELU.

    Raises:
        ValueError: the form is unknown.
    """
    if approximate not in APPROXIMATES:
        raise ValueError(
            f"approximate must be one of {', '.join(APPROXIMATES)}, got {approximate!r}"
        )
    return "gelu" if approximate == "none" else "gelu_tanh"


def check(x: Tensor, bias: Tensor | None, kind: Activation) -> None:
    """Refuses arguments of an activation.

    Raises:
        ValueError: a shape or a device is wrong.
        TypeError: a dtype is wrong.
    """
    for tensor in (x,) if bias is None else (x, bias):
        if not tensor.is_floating_point():
            raise TypeError(f"x and bias must be floating point, got {tensor.dtype}")
    num_columns = x.shape[-1] if x.dim() else 0
    if num_columns == 0 or (kind in GATED and num_columns % 2):
        rule = "an even number of columns, gate and up," if kind in GATED else "columns"
        raise ValueError(f"x must have {rule} for {kind}, got shape {list(x.shape)}")
    if bias is not None and bias.shape != (num_columns,):
        raise ValueError(
            f"bias must have shape [{num_columns}], one number for each column of x, got "
            f"{list(bias.shape)}"
        )
    if bias is not None and bias.device != x.device:
        raise ValueError(f"bias must be on {x.device} as x is, got {bias.device}")
