"""The gradients of leaves in the strides that autograd gives them.

torch gives the `.grad` of a leaf the strides of the leaf. In a model that is not cut, a gradient
keeps its strides; sums over a gradient with other strides would round differently.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..._C import Landing
from ...torch_private import num_holders

__all__ = ["Landing", "copy_of", "memory_of", "span", "take"]


def take(landing: Landing) -> Tensor | None:
    """The gradient of the leaf, in memory that nothing else writes; restores the leaf.

    torch makes a gradient the `.grad` of a parameter if the tensor has one holder, although other
    tensors may be views of the gradient. The next microbatch writes into that memory.
    """
    gradient = landing.take()
    if type(gradient) is not Tensor:
        return None if gradient is None else _of_class(gradient)
    if gradient.layout is not torch.strided:
        return gradient
    # A view holds its base tensor.
    if num_holders(gradient) > _ALONE + gradient._is_view():
        return copy_of(gradient)
    return gradient


def _of_class(gradient: Tensor) -> Tensor:
    """The gradient; for a fake tensor, a copy wherever `take` would copy a real tensor."""
    if not isinstance(gradient, FakeTensor):
        return gradient
    # The base of a fake view has one holder more.
    alone = num_holders(gradient) <= _ALONE + 2 * gradient._is_view()
    return gradient if alone else copy_of(gradient)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, also for overlapping or spaced elements."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor.clone()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return memory_of(tensor).clone().as_strided(tensor.shape, tensor.stride(), 0)


def memory_of(tensor: Tensor) -> Tensor:
    """The memory from the tensor's first element to its last: `span` elements."""
    return tensor.as_strided((span(tensor),), (1,))


def span(tensor: Tensor) -> int:
    """The number of elements of memory from the tensor's first to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


_ALONE = num_holders(torch.empty(1))
