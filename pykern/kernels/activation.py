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

# The first two multiply an activation of the first half of the columns by the second half.
Gated = Literal["swiglu", "geglu"]
GATED: tuple[Gated, ...] = get_args(Gated)
# The form of GELU: of the error function, as nn.GELU() has it, or of the hyperbolic tangent.
Approximate = Literal["none", "tanh"]
APPROXIMATES: tuple[Approximate, ...] = get_args(Approximate)
Activation = Literal["swiglu", "geglu", "gelu", "gelu_tanh"]


def activated(x: Tensor, bias: Tensor | None, kind: Activation) -> Tensor:
    """The operation in plain torch, in float32 until its result is rounded.

    Args:
        x: floating, of any shape.
        bias: floating, added to each row of `x`; None for none, and where the kind is gated.
        kind: which activation.

    Returns:
        Of the type of `x`, contiguous; gated kinds have half of its columns.
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
        x: as it was.
        bias: as it was.
        kind: as it was.
        again: whether the result of `activated` is wanted once more, the same bits.

    Returns:
        The gradient of `x` of its type and shape, contiguous; that of the bias in float32, or
        float64, without elements if there is none; what `activated` returned, or no elements.
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
    # One row is its own sum, but two results of an operation share no memory.
    of_bias = before.new_empty(0) if bias is None else of_x.sum_to_size(bias.shape).clone()
    return of_x.to(x.dtype), of_bias, after.to(x.dtype)


def _parts(x: Tensor, bias: Tensor | None, kind: Activation) -> tuple[Tensor, Tensor | None]:
    """What the activation is of, and what it is multiplied by."""
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


activate = define(
    "activate(Tensor x, Tensor? bias, str kind) -> Tensor", activated, "activation:activated"
)
activate_backward = define(
    "activate_backward(Tensor gradient, Tensor x, Tensor? bias, str kind, bool again)"
    " -> (Tensor, Tensor, Tensor)",
    differentiated,
    "activation:differentiated",
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
        ValueError: the number of columns is odd, or there are none.
        TypeError: `gate_up` is not floating.

    Paper: N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    check(gate_up, None, "swiglu")
    return _Activation.apply(gate_up, None, "swiglu", stash.level())  # type: ignore[no-any-return,no-untyped-call]


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with GELU in the form of the tangent: the activation of Gemma and T5 1.1.

    Args:
        gate_up: float32, bfloat16, float16 or float64, [..., 2 * f]: the gate, then up.

    Returns:
        [..., f], of the same type; rounded once from float32.

    Raises:
        ValueError: the number of columns is odd, or there are none.
        TypeError: `gate_up` is not floating.

    Paper: N. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    check(gate_up, None, "geglu")
    return _Activation.apply(gate_up, None, "geglu", stash.level())  # type: ignore[no-any-return,no-untyped-call]


def gelu(x: Tensor, bias: Tensor | None = None, *, approximate: Approximate = "none") -> Tensor:
    """X + bias times the normal distribution's share below it.

    Args:
        x: float32, bfloat16, float16 or float64, [..., f].
        bias: floating, [f]; added in float32. None for none.
        approximate: "none" is the exact form, of the error function: nn.GELU(), BERT, GPT-NeoX.
            "tanh" approximates it: GPT-2, GPT-J.

    Returns:
        As `x`, contiguous; rounded once from float32.

    Raises:
        ValueError: `x` has no columns, the bias is not one row of `x` or on another device, or
            there is no such form.
        TypeError: `x` or the bias is not floating.

    Paper: D. Hendrycks, K. Gimpel, "Gaussian Error Linear Units", 2016.
    """
    kind = gelu_kind(approximate)
    check(x, bias, kind)
    return _Activation.apply(x, bias, kind, stash.level())  # type: ignore[no-any-return,no-untyped-call]


def gelu_kind(approximate: Approximate) -> Activation:
    """The kind of a form of GELU.

    Raises:
        ValueError: there is no such form.
    """
    if approximate not in APPROXIMATES:
        raise ValueError(f"a form of GELU is one of {', '.join(APPROXIMATES)}, got {approximate!r}")
    return "gelu" if approximate == "none" else "gelu_tanh"


def check(x: Tensor, bias: Tensor | None, kind: Activation) -> None:
    """Refuses arguments of an activation.

    Raises:
        ValueError: a shape or a device is wrong.
        TypeError: a type is.
    """
    for tensor in (x,) if bias is None else (x, bias):
        if not tensor.is_floating_point():
            raise TypeError(f"an activation is of floating numbers, got {tensor.dtype}")
    num_columns = x.shape[-1] if x.dim() else 0
    if num_columns == 0 or (kind in GATED and num_columns % 2):
        rule = "an even number of columns, gate and up" if kind in GATED else "columns"
        raise ValueError(f"{kind} needs {rule}, got a tensor of shape {list(x.shape)}")
    if bias is not None and bias.shape != (num_columns,):
        raise ValueError(f"a bias of shape {list(bias.shape)} is no row of {num_columns} columns")
    if bias is not None and bias.device != x.device:
        raise ValueError(f"the bias is on {bias.device} and the tensor on {x.device}")
