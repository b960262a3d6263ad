"""The gradients of leaves as autograd hands them over, in strides of their own.

torch lays the `.grad` of a leaf out like the leaf. Where a model's graph is not cut, a gradient
goes on as it comes; sums over one that has been laid out anew would round otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..torch_private import num_holders

# Among the hooks of a leaf, where those that layers have registered have numbers from 0 on.
_KEY = -1


class Landing:
    """Takes the gradient of one leaf instead of its `.grad`: made before a backward, for one.

    Attributes:
        gradient: what has come; None if nothing.
    """

    __slots__ = ("_leaf", "gradient")

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = leaf
        self.gradient: Tensor | None = None
        hooks = leaf._backward_hooks
        if hooks is None:
            leaf._backward_hooks = {_KEY: self}
        else:
            # Behind those of layers, which may change the gradient.
            hooks[_KEY] = self

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Called by autograd when all of the gradient is there."""
        # Next comes what adds to `.grad`, which leaves a tensor alone that requires none.
        self._leaf.requires_grad_(False)
        self.gradient = gradient
        return None

    def take(self) -> Tensor | None:
        """The gradient, into which nothing else writes; the leaf is again what it was."""
        leaf, gradient = self._leaf, self.gradient
        leaf.requires_grad_()
        hooks = leaf._backward_hooks
        assert hooks is not None
        if len(hooks) == 1:
            leaf._backward_hooks = None
        else:
            del hooks[_KEY]
        return copy_of(gradient) if gradient is not None and _is_shared(gradient) else gradient


def copy_of(tensor: Tensor) -> Tensor:
    """A copy in the same strides, elements that lie on each other or apart included."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor.clone()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return memory_of(tensor).clone().as_strided(tensor.shape, tensor.stride(), 0)


def memory_of(tensor: Tensor) -> Tensor:
    """The elements of memory from the tensor's first to its last: as many as `span` says."""
    return tensor.as_strided((span(tensor),), (1,))


def span(tensor: Tensor) -> int:
    """How many elements of memory there are from the tensor's first to its last."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _is_shared(gradient: Tensor) -> bool:
    """Whether the memory belongs to another tensor too, such as the `.grad` of a parameter.

    torch makes a gradient a parameter's `.grad` where nothing else has the same tensor, though
    others may have views of it. The next microbatch writes into it.
    """
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return False
    # A view keeps the tensor that it is of.
    return num_holders(gradient) > _ALONE + gradient._is_view()


_ALONE = num_holders(torch.empty(1))
