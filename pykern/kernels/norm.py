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
from .dropout import keeps, threshold
from .handover import TwoParts, Weights
from .operation import define, wide

NormKind = Literal["rms", "layer"]

_native: Any = torch.ops.aten


def add_and_normalise(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    dtype: torch.dtype,
    rate: float,
    seed: int,
    place: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operation in plain torch. It normalises the rounded sum, which is what is kept.

    Args:
        x: floating [..., h].
        delta: floating, of that shape; without it the sum is `x`.
        weight: floating [h].
        bias: floating [h], of LayerNorm only.
        eps: added to the variance or mean square.
        centred: whether it is LayerNorm.
        dtype: of the normed output.
        rate: of the dropout of `delta`, 0 <= rate < 1.
        seed: as of `seeds.Seed`.
        place: as of `seeds.Seed`.

    Returns:
        The sum, as `x`, empty without a delta; the normed output; 1 / deviation, [..., 1], and the
        mean, likewise but empty for RMSNorm, both in the type of `wide`.
    """
    added, total = x.new_empty(0), x
    if delta is not None:
        term = wide(delta)
        if rate:
            term = torch.where(keeps(delta, rate, seed, place), term * (1 / (1 - rate)), 0.0)
        added = total = (wide(x) + term).to(x.dtype).contiguous()
    normed, rstd, mean = _normalised(wide(total).contiguous(), weight, bias, eps, centred)
    return added, normed.to(dtype), rstd, mean


def _normalised(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight.to(x.dtype)
    if centred:
        bias = None if bias is None else bias.to(x.dtype)
        normed, mean, rstd = _native.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        return normed, rstd, mean
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    rstd = (norm.square() / x.shape[-1] + eps).rsqrt()
    return (x * rstd).mul_(weight), rstd, x.new_empty(0)


def gradients(
    gradient: Tensor,
    residual: Tensor | None,
    total: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rstd: Tensor,
    mean: Tensor,
    eps: float,
    centred: bool,
    again: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward in plain torch.

    Args:
        gradient: of the normed output, [..., h].
        residual: the gradient that comes into the sum from elsewhere, of that shape.
        total: the sum.
        weight: as of the forward.
        bias: as of the forward.
        rstd: as the forward returned it.
        mean: as the forward returned it.
        eps: as of the forward.
        centred: as of the forward.
        again: whether to make the normed output again, bit by bit as it was.

    Returns:
        The gradient of the sum, as it, `residual` added before the one rounding; the normed output,
        of the type of `gradient`, empty if not wanted; the gradients of weight and, if there is
        one, of bias, [1 or 2, h], in the type of `wide`.
    """
    x, g = wide(total).contiguous(), wide(gradient).contiguous()
    scale = weight.to(x.dtype)
    if centred:
        mask = [True, True, bias is not None]
        of_total, *of_weights = _native.native_layer_norm_backward(
            g, x, x.shape[-1:], mean, rstd, scale, bias if bias is None else bias.to(x.dtype), mask
        )
    else:
        normal = x * rstd
        of_weights = [(g * normal).reshape(-1, x.shape[-1]).sum(0)]
        g = g * scale
        slope = (g * normal).mean(-1, keepdim=True)
        of_total = (g - normal * slope) * rstd
    if residual is not None:
        of_total = of_total + wide(residual)
    normed = gradient.new_empty(0)
    if again:
        normed = _normalised(x, weight, bias, eps, centred)[0].to(gradient.dtype)
    kept = of_weights[: 1 if bias is None else 2]
    return of_total.to(total.dtype).contiguous(), normed, torch.stack(kept)


forward_op = define(
    "norm(Tensor x, Tensor? delta, Tensor weight, Tensor? bias, float eps, bool centred, "
    "ScalarType dtype, float rate, int seed, Tensor? place) -> (Tensor, Tensor, Tensor, Tensor)",
    add_and_normalise,
    "norm:add_and_normalise",
)
backward_op = define(
    "norm_backward(Tensor gradient, Tensor? residual, Tensor total, Tensor weight, Tensor? bias, "
    "Tensor rstd, Tensor mean, float eps, bool centred, bool again) -> (Tensor, Tensor, Tensor)",
    gradients,
    "norm:gradients",
)


class NormOptions(NamedTuple):
    """What is no tensor of a call.

    Attributes:
        centred: whether it is LayerNorm.
        eps: added to the variance or mean square.
        rate: of the dropout of the delta; 0 if it is not to be dropped.
        seed: of that dropout, where it is no tensor.
    """

    centred: bool
    eps: float
    rate: float
    seed: int


def of_delta(
    of_total: Tensor, dtype: torch.dtype | None, norm: NormOptions, place: Tensor | None
) -> Tensor | None:
    """The gradient of a delta of some type, if there is one: the mask is made again."""
    if dtype is None:
        return None
    if norm.rate:
        of_total = torch.ops.pykern.dropout(of_total, norm.rate, norm.seed, place)
    return of_total.to(dtype)


class _Norm(TwoParts):
    """The sum, which may be `x`, and the normed output."""

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

    It is computed in float32 and rounded once, after the product with the weight.

    Args:
        x: float32, bfloat16, float16 or float64, [..., h].
        weight: any of these, [h].
        eps: added to the mean square, above 0.

    Returns:
        As `x`.

    Raises:
        ValueError: a shape, type, device or number is none of these.

    Paper: B. Zhang and R. Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019.
    """
    norm = checked(x, None, weight, None, "rms", eps)
    return _Norm.apply(x, None, weight, None, None, norm)[1]  # type: ignore[no-any-return,no-untyped-call]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Rows of (x - mean(x)) / deviation(x) * weight + bias; rows are the last dimension.

    It is computed in float32 and rounded once.

    Args:
        x: float32, bfloat16, float16 or float64, [..., h].
        weight: any of these, [h].
        bias: likewise.
        eps: added to the variance, above 0.

    Returns:
        As `x`.

    Raises:
        ValueError: a shape, type, device or number is none of these.

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

    The sum is rounded to the type of `x`, and what is normalised is the rounded sum.

    Args:
        x: the residual: float32, bfloat16, float16 or float64, [..., h].
        delta: what a layer adds to it: any of these, of its shape.
        weight: of the norm: any of these, [h].
        bias: of LayerNorm: likewise.
        kind: "rms" or "layer".
        eps: as of `rms_norm` and `layer_norm`.
        rate: as of `dropout.dropout`.
        training: False leaves `delta` as it is.

    Returns:
        The sum and the normed output, each as `x`. Only the sum is kept for the backward.

    Raises:
        ValueError: a shape, type, device or number is none of these.
    """
    norm = checked(x, delta, weight, bias, kind, eps, rate)
    norm, place = drawn(norm, training)
    return _Norm.apply(x, delta, weight, bias, place, norm)  # type: ignore[no-any-return,no-untyped-call]


def drawn(norm: NormOptions, training: bool) -> tuple[NormOptions, Tensor | None]:
    """With a seed where elements are to be dropped, or where that seed is."""
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
    """The norm that is asked for.

    Raises:
        ValueError: a shape, type, device or number is none that a norm takes.
    """
    if kind not in get_args(NormKind):
        raise ValueError(f"a norm is one of {', '.join(get_args(NormKind))}, got {kind!r}")
    if kind == "rms" and bias is not None:
        raise ValueError("a norm of kind rms has no bias")
    if not (eps > 0 and math.isfinite(eps)):
        raise ValueError(f"eps of a norm is above 0 and finite, got {eps}")
    threshold(rate)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"a norm is over at least one column, x has shape {tuple(x.shape)}")
    row = x.shape[-1:]
    shapes = [("x", x, x.shape), ("delta", delta, x.shape), ("weight", weight, row)]
    for name, tensor, shape in [*shapes, ("bias", bias, row)]:
        if tensor is not None:
            _check_tensor(name, tensor, shape, x.device)
    return NormOptions(kind == "layer", eps, rate, 0)


def _check_tensor(name: str, tensor: Tensor, shape: torch.Size, device: torch.device) -> None:
    if tensor.shape != shape:
        raise ValueError(
            f"{name} of a norm has shape {tuple(shape)} here, got {tuple(tensor.shape)}"
        )
    if not tensor.is_floating_point():
        raise ValueError(f"{name} of a norm is floating, got {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} of a norm is on {device} as x is, got {tensor.device}")
