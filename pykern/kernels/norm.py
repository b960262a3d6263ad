"""RMSNorm and LayerNorm of a residual, to which a delta is added first, through dropout.

Papers: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019;
    J. Ba, J. Kiros and G. Hinton, "Layer Normalization", 2016.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from . import seeds
from .dropout import threshold
from .handover import TwoParts, Weights
from .norm_operation import backward_op, forward_op

NormKind = Literal["rms", "layer"]


class NormOptions(NamedTuple):
    """The arguments of a call that are not tensors.

    Attributes:
        centred: whether the norm is LayerNorm.
        eps: added to the variance or mean square.
        rate: of the dropout of the delta; 0 for no dropout.
        seed: of that dropout, if the seed is not in a tensor.
    """

    centred: bool
    eps: float
    rate: float
    seed: int


def of_delta(
    of_total: Tensor, dtype: torch.dtype | None, norm: NormOptions, place: Tensor | None
) -> Tensor | None:
    """The gradient of a delta of the given dtype, if any; recomputes the dropout mask."""
    if dtype is None:
        return None
    if norm.rate:
        of_total = torch.ops.pykern.dropout(of_total, norm.rate, norm.seed, place)
    return of_total.to(dtype)


class _Norm(TwoParts):
    """The operation; returns the sum, which may be `x`, and the normed output."""

    weights = (2, 3)

    @staticmethod
    def compute(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        place: Tensor | None,
        norm: NormOptions,
    ) -> tuple[Tensor, Tensor]:
        centred, eps, rate, seed = norm
        added, normed, rstd, mean = forward_op(
            x, delta, weight, bias, eps, centred, x.dtype, rate, seed, place
        )
        total = x if delta is None else added
        ctx.save_for_backward(total, weight, bias, place, rstd, mean)
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.delta_dtype = norm, None if delta is None else delta.dtype
        return total, normed

    @staticmethod
    def gradients(ctx: Any, *gradients: Tensor) -> tuple[list[Tensor | None], Weights]:
        residual, gradient = gradients
        total, weight, bias, place, rstd, mean = ctx.saved_tensors
        norm = ctx.norm
        if gradient is None:
            gradient = torch.zeros_like(total)
        of_total, _, of_weights = backward_op(
            gradient, residual, total, weight, bias, rstd, mean, norm.eps, norm.centred, False
        )

        def weights() -> dict[int, Tensor]:
            computed = {2: of_weights[0].to(weight.dtype)}
            return computed if bias is None else computed | {3: of_weights[1].to(bias.dtype)}

        of_inputs = [of_total, of_delta(of_total, ctx.delta_dtype, norm, place)]
        return [*of_inputs, *[None] * 4], weights


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Rows of x / root mean square(x) * weight; rows are the last dimension.

    The result is computed in float32 and rounded once, after the product with the weight.

    Args:
        x: float32, bfloat16, float16 or float64, [..., h].
        weight: any of these types, [h].
        eps: added to the mean square, above 0.

    Returns:
        As `x`.

    Raises:
        ValueError: a shape, dtype, device or value is unsupported.

    Paper: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
    """
    norm = checked(x, None, weight, None, "rms", eps)
    return _Norm.apply(x, None, weight, None, None, norm)[1]  # type: ignore[no-any-return,no-untyped-call]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Rows of (x - mean(x)) / deviation(x) * weight + bias; rows are the last dimension.

    The result is computed in float32 and rounded once.

    Args:
        x: float32, bfloat16, float16 or float64, [..., h].
        weight: any of these types, [h].
        bias: likewise.
        eps: added to the variance, above 0.

    Returns:
        As `x`.

    Raises:
        ValueError: a shape, dtype, device or value is unsupported.

    Paper: J. Ba, J. Kiros and G. Hinton, "Layer Normalization", 2016.
    """
    norm = checked(x, None, weight, bias, "layer", eps)
    return _Norm.apply(x, None, weight, bias, None, norm)[1]  # type: ignore[no-any-return,no-untyped-call]


def add_norm(
    x: Tensor,
    delta: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: NormKind,
    eps: float,
    rate: float = 0.0,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """The sum x + dropout(delta), and its norm.

    The sum is rounded to the type of `x`, and then normalised.

    Args:
        x: the residual: float32, bfloat16, float16 or float64, [..., h].
        delta: the term that a layer adds to it: any of these types, of its shape.
        weight: of the norm: any of these types, [h].
        bias: of LayerNorm: likewise.
        kind: "rms" or "layer".
        eps: as of `rms_norm` and `layer_norm`.
        rate: as of `dropout.dropout`.
        training: False adds `delta` without dropout.

    Returns:
        The sum and the normed output, each as `x`. Only the sum is saved for the backward.

    Raises:
        ValueError: a shape, dtype, device or value is unsupported.
    """
    norm = checked(x, delta, weight, bias, kind, eps, rate)
    norm, place = drawn(norm, training)
    return _Norm.apply(x, delta, weight, bias, place, norm)  # type: ignore[no-any-return,no-untyped-call]


def drawn(norm: NormOptions, training: bool) -> tuple[NormOptions, Tensor | None]:
    """The options with a seed for dropout, or with the tensor that will hold the seed."""
    if norm.rate == 0 or not training:
        return norm._replace(rate=0.0), None
    seed = seeds.draw()
    return norm._replace(seed=seed.value), seed.place


def checked(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    kind: NormKind,
    eps: float,
    rate: float = 0.0,
) -> NormOptions:
    """Checks the arguments of a norm, and returns its options.

    Raises:
        ValueError: a shape, dtype, device or value is unsupported.
    """
    if kind not in get_args(NormKind):
        raise ValueError(f"kind must be one of {', '.join(get_args(NormKind))}, got {kind!r}")
    if kind == "rms" and bias is not None:
        raise ValueError("bias must be None for a norm of kind rms, got a tensor")
    if not (eps > 0 and math.isfinite(eps)):
        raise ValueError(f"eps must be above 0 and finite, got {eps}")
    threshold(rate)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have at least one column, got shape {tuple(x.shape)}")
    row = x.shape[-1:]
    shapes = [("x", x, x.shape), ("delta", delta, x.shape), ("weight", weight, row)]
    for name, tensor, shape in [*shapes, ("bias", bias, row)]:
        if tensor is not None:
            _check_tensor(name, tensor, shape, x.device)
    return NormOptions(kind == "layer", eps, rate, 0)


def _check_tensor(name: str, tensor: Tensor, shape: torch.Size, device: torch.device) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"{name} of a norm must have shape {tuple(shape)}, got {tuple(tensor.shape)}"
        )
    if not tensor.is_floating_point():
        raise ValueError(f"{name} of a norm must be floating point, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} of a norm must be on {device} as x is, got {tensor.device}")
