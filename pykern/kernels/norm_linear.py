"""A norm fused with the linear layer behind it; the tensor between them is not saved.

The gradient of the linear layer's weight needs the normed output. The backward of the norm reads
the inputs of that output anyway, and recomputes it on the way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .handover import TwoParts, Weights
from .levels import level
from .norm import NormKind, NormOptions, checked, drawn, of_delta
from .norm_operation import backward_op, forward_op
from .operation import multiplied_type


class _NormLinear(TwoParts):
    """The operation; returns the sum, which may be `x`, and the linear layer's output."""

    weights = (2, 3, 4, 5)

    @staticmethod
    def compute(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        place: Tensor | None,
        norm: NormOptions,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        centred, eps, rate, seed = norm
        added, normed, rstd, mean = forward_op(
            x, delta, norm_weight, norm_bias, eps, centred, dtype, rate, seed, place
        )
        total = x if delta is None else added
        kept = normed if level() == "none" and ctx.needs_input_grad[4] else None
        # The backward casts the weight again, too, so that no copy of a parameter is saved.
        ctx.save_for_backward(total, norm_weight, norm_bias, weight, bias, place, rstd, mean, kept)
        ctx.set_materialize_grads(False)
        ctx.norm, ctx.delta_dtype = norm, None if delta is None else delta.dtype
        ctx.dtype = dtype
        return total, F.linear(normed, weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def gradients(ctx: Any, *gradients: Tensor) -> tuple[list[Tensor | None], Weights]:
        residual, gradient = gradients
        total, norm_weight, norm_bias, weight, bias, place, rstd, mean, kept = ctx.saved_tensors
        norm, needed = ctx.norm, ctx.needs_input_grad
        if gradient is None:
            gradient = total.new_zeros((*total.shape[:-1], len(weight)), dtype=ctx.dtype)
        again = needed[4] and kept is None
        of_total, made, of_norm = backward_op(
            gradient @ weight.to(ctx.dtype),
            residual,
            total,
            norm_weight,
            norm_bias,
            rstd,
            mean,
            norm.eps,
            norm.centred,
            again,
        )
        normed = made if again else kept

        def weights() -> dict[int, Tensor]:
            rows = gradient.reshape(-1, len(weight))
            computed = {2: of_norm[0].to(norm_weight.dtype)}
            if needed[3]:
                computed[3] = of_norm[1].to(norm_bias.dtype)
            if needed[4]:
                computed[4] = (rows.T @ normed.reshape(-1, weight.shape[1])).to(weight.dtype)
            if needed[5]:
                computed[5] = rows.sum(0).to(bias.dtype)
            return computed

        of_inputs = [of_total, of_delta(of_total, ctx.delta_dtype, norm, place)]
        return [*of_inputs, *[None] * 7], weights


def norm_linear(
    x: Tensor,
    delta: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: NormKind,
    eps: float,
    rate: float = 0.0,
    training: bool = True,
) -> tuple[Tensor, Tensor]:
    """The sum x + dropout(delta), and a linear layer of its norm.

    The operation saves the sum, which the model needs anyway, and 4 bytes for each of its rows, or
    8 for LayerNorm; at level "none" (`pykern.kernels.levels`) the normed output, too.

    Args:
        x: the residual: float32, bfloat16, float16 or float64, [..., h].
        delta: the term that a layer adds to it: any of these types, of its shape; None for no term.
        norm_weight: of the norm: any of these types, [h].
        norm_bias: of LayerNorm: likewise, or None.
        weight: of the linear layer, [outputs, h], of the type of `x` outside autocast.
        bias: likewise, [outputs].
        kind: "rms" or "layer".
        eps: as of `norm.rms_norm` and `norm.layer_norm`.
        rate: as of `dropout.dropout`.
        training: False adds `delta` without dropout.

    Returns:
        The sum, as `x`; without a delta it shares the memory of `x`. The linear layer's output
        [..., outputs], of the type of `x`, or of autocast's type as in `torch.nn.Linear`. Use the
        returned sum as the residual: then the norm's kernel adds the residual's gradient.

    Raises:
        ValueError: a shape, dtype, device or value is unsupported.

    Paper: V. Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
        MLSys 2023.
    """
    norm = checked(x, delta, norm_weight, norm_bias, kind, eps, rate)
    dtype = _check_linear(x, weight, bias)
    norm, place = drawn(norm, training and delta is not None)
    arguments = (x, delta, norm_weight, norm_bias, weight, bias, place, norm, dtype)
    return _NormLinear.apply(*arguments)  # type: ignore[no-any-return,no-untyped-call]


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The type of the linear layer's product."""
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"weight of a linear layer must have shape (outputs, {x.shape[-1]}), got "
            f"{tuple(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias of a linear layer must have shape ({len(weight)},), got {tuple(bias.shape)}"
        )
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype is not torch.float64
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.device != x.device:
            raise ValueError(
                f"{name} of a linear layer must be on {x.device} as x is, got {tensor.device}"
            )
        if tensor.dtype is not x.dtype and not (casts and tensor.is_floating_point()):
            raise ValueError(
                f"{name} of a linear layer must be {x.dtype} as x is, got {tensor.dtype}"
            )
    return multiplied_type(x)
