"""Clipping by the norm of all gradients, summed in an order that does not depend on devices."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients down, in place, where their norm is above `max_norm`.

    `torch.nn.utils.clip_grad_norm_` groups gradients by device and type first, and adds up by
    group. Here the norm of each gradient, in float32 or a wider type, is taken on its device; these
    are combined in the order of the parameters, on the device of the first. So the bits are the
    same for every number of stages and devices of a kind.

    Args:
        parameters: those whose `.grad`, dense and of any shape, is clipped; None is passed over.
        max_norm: what the norm is at most afterwards, up to rounding.
        norm_type: p of the p-norm; may be `inf`.
        error_if_nonfinite: whether a norm that is infinite or NaN is an error.

    Returns:
        The norm before: [], on the device of the first gradient; 0 where there are none.

    Raises:
        ValueError: `max_norm` is negative or NaN.
        RuntimeError: the norm is not finite, and is to be; gradients are as before.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm is a number of at least 0, got {max_norm}")
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = [_norm(gradient, norm_type).to(gradients[0].device) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot be "
            "clipped by it; error_if_nonfinite=False scales them by it anyway"
        )
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, norm_type, dtype=dtype)
    return norm
