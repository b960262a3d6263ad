"""The operation of `norm` and its backward, in plain torch, without autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .dropout import keeps
from .operation import define, wide

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
    """The operation in plain torch. It normalises the rounded sum, which is saved.

    Args:
        x: floating [..., h].
        delta: floating, of that shape; without a delta the sum is `x`.
        weight: floating [h].
        bias: floating [h], of LayerNorm only.
        eps: added to the variance or mean square.
        centred: whether the norm is LayerNorm.
        dtype: of the normed output.
        rate: of the dropout of `delta`, 0 <= rate < 1.
        seed: as of `seeds.Seed`.
        place: as of `seeds.Seed`.

    Returns:
        The sum, as `x`, empty without a delta; the normed output; 1 / deviation, [..., 1]; and the
        mean, likewise but empty for RMSNorm. The last two are in the type of `wide`.
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
        residual: another gradient of the sum, from the residual stream, of that shape.
        total: the sum.
        weight: as of the forward.
        bias: as of the forward.
        rstd: as the forward returned it.
        mean: as the forward returned it.
        eps: as of the forward.
        centred: as of the forward.
        again: whether to recompute the normed output, bit for bit.

    Returns:
        The gradient of the sum, as the sum, with `residual` added before the one rounding; the
        normed output, of the type of `gradient`, empty if not wanted; the gradients of the weight
        and of the bias, if any, [1 or 2, h], in the type of `wide`.
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
)
backward_op = define(
    "norm_backward(Tensor gradient, Tensor? residual, Tensor total, Tensor weight, Tensor? bias, "
    "Tensor rstd, Tensor mean, float eps, bool centred, bool again) -> (Tensor, Tensor, Tensor)",
    gradients,
)
