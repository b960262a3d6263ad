"""Copies of tensors with the strides that they have, also where elements overlap."""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_private import is_traceable_wrapper_subclass


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, also for overlapping or spaced elements."""
    is_plain = tensor.layout is torch.strided and not is_traceable_wrapper_subclass(tensor)
    if not is_plain or tensor.is_contiguous():
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
