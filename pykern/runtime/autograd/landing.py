"""The gradients of leaves in the strides that autograd gives them.

torch gives the `.grad` of a leaf the strides of the leaf. In a model that is not cut, a gradient
keeps its strides; sums over a gradient with other strides would round differently.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ..._C import collect, prepare_collect
from ...tensors.strides import copy_of
from ...torch_private import holders_at, num_holders, storage_of
from .failed import let_go

__all__ = ["collect", "landed", "settled"]

# Runs a backward through one graph, given its outputs, their gradients, and its leaves.
Through = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], None]


def settled(gradient: Tensor) -> Tensor:
    """The gradient in memory that nothing else writes.

    torch makes a gradient the `.grad` of a parameter if the tensor has one holder, although other
    tensors may be views of the gradient. The next microbatch writes into that memory.
    """
    if gradient.layout is not torch.strided:
        return gradient
    if type(gradient) is Tensor:
        # A view holds its base tensor.
        alone = num_holders(gradient) <= _ALONE + gradient._is_view()
        return gradient if alone else copy_of(gradient)
    if isinstance(gradient, FakeTensor):
        # A copy wherever a real tensor would be copied; a fake view's base has one holder more.
        alone = num_holders(gradient) <= _ALONE + 2 * gradient._is_view()
        return gradient if alone else copy_of(gradient)
    return gradient


def landed(
    leaves: Sequence[Tensor],
    through: Through,
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor],
) -> Sequence[Tensor | None]:
    """The gradients of the leaves, after a backward from the outputs, if there are any."""
    try:
        found = collect(through, (leaves,), outputs, gradients, leaves)
    except BaseException:
        let_go()
        raise
    return (None,) * len(leaves) if found is None else found


_ALONE = num_holders(torch.empty(1))
prepare_collect(Tensor, torch.strided, storage_of, holders_at, settled)
