"""Clipping by the norm of all gradients, summed in an order that does not depend on devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..modes import no_grad
from ..tensors.dtensor import local, whole

# Parameters whose gradients are each in one process only, as keys; the values have no meaning.
shared_out = WeakTensorKeyDictionary()


@no_grad
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales gradients down, in place, if their norm is above `max_norm`.

    `torch.nn.utils.clip_grad_norm_` groups gradients by device and type first, and adds up by
    group. Here the norm of each gradient, in float32 or a wider type, is taken on its device; these
    norms are combined in the order of the parameters, on the device of the first gradient. So the
    bits are the same for every number of stages and devices of a kind.

    Args:
        parameters: parameters whose `.grad`, dense and of any shape, is clipped; a `.grad` of None
            is skipped. A DTensor counts as a whole; its processes call this function together.
        max_norm: the largest norm afterwards, up to rounding.
        norm_type: p of the p-norm; may be `inf`, also as a string, as for torch's function.
        error_if_nonfinite: whether a norm that is infinite or NaN is an error.

    Returns:
        The norm before, [], on the device of the first gradient; 0 without gradients.

    Raises:
        ValueError: `max_norm` is negative or NaN.
        TypeError: a gradient is not dense; gradients are unchanged.
        RuntimeError: `error_if_nonfinite` is set and the norm is not finite; gradients are
            unchanged. Or a `ZeroOptimizer` shares out the gradients to processes: call the
            `clip_grad_norm_` of that optimizer.
    """
    require_norm(max_norm)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(each in shared_out for each in parameters):
        raise RuntimeError(
            "clip_grad_norm_ must be called of the ZeroOptimizer, in every process, got a call in "
            "a process that has the gradients of some parameters only"
        )
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not gradients:
        return torch.zeros(())
    norms = [norm_of(gradient, norm_type).to(gradients[0].device) for gradient in gradients]
    return clip_by(gradients, norms, max_norm, norm_type, error_if_nonfinite)


def clip_by(
    gradients: Sequence[Tensor],
    norms: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Clips this process's gradients as `clip_grad_norm_` does, by the norms of all gradients."""
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), float(norm_type))
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients must be finite to clip by it, got "
            f"{total.item()}. error_if_nonfinite=False scales by it anyway"
        )
    # Local parts are scaled in place of DTensors: torch cannot scale those of several meshes.
    parts: Any = [SimpleNamespace(grad=local(gradient)) for gradient in gradients]
    torch.nn.utils.clip_grads_with_norm_(parts, max_norm, total)
    return total


def require_norm(max_norm: float) -> None:
    """Raises ValueError if the largest norm is negative or NaN."""
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, got {max_norm}")


def norm_of(gradient: Tensor, norm_type: float) -> Tensor:
    """The norm of one gradient, in float32 or a wider type: [].

    Raises:
        TypeError: the gradient is not dense.
    """
    if gradient.layout is not torch.strided:
        raise TypeError(
            f"gradients must be dense to be clipped, got layout {gradient.layout} of shape "
            f"{tuple(gradient.shape)}. Make the layer with sparse=False"
        )
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(gradient, float(norm_type), dtype=dtype)
    return whole(norm)
