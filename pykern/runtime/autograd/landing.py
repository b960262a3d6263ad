"""The gradients of leaves in the strides that autograd gives them.

torch gives the `.grad` of a leaf the strides of the leaf. In a model that is not cut, a gradient
keeps its strides; sums over a gradient with other strides would round differently.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...torch_private import num_holders

# The key among the hooks of a leaf; hooks that layers register have numbers from 0 on.
_KEY = -1


class Landing:
    """Collects the gradient of one leaf in place of `.grad`; made before each backward.

    Attributes:
        gradient: the gradient; None before it arrives.
    """

    __slots__ = ("_leaf", "gradient")

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = leaf
        self.gradient: Tensor | None = None
        hooks = leaf._backward_hooks
        if hooks is None:
            leaf._backward_hooks = {_KEY: self}
        else:
            # After the hooks of layers, which may change the gradient.
            hooks[_KEY] = self

    def __call__(self, gradient: Tensor) -> Tensor | None:
        """Called by autograd when the gradient is complete."""
        # AccumulateGrad runs next, and ignores a tensor that does not require grad.
        self._leaf.requires_grad_(False)
        self.gradient = gradient
        return None

    def take(self) -> Tensor | None:
        """The gradient in memory that nothing else writes; restores the leaf."""
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
    """A copy with the same strides, also for overlapping or spaced elements."""
    if tensor.is_contiguous() or tensor.layout is not torch.strided:
        return tensor.clone()
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return memory_of(tensor).clone().as_strided(tensor.shape, tensor.stride(), 0)


def memory_of(tensor: Tensor) -> Tensor:
    """The memory from the tensor's first element to its last; `span` is the number of elements."""
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

    torch makes a gradient the `.grad` of a parameter if the tensor has one holder, although other
    tensors may be views of the gradient. The next microbatch writes into that memory.
    """
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return False
    # A view holds its base tensor.
    return num_holders(gradient) > _ALONE + gradient._is_view()


_ALONE = num_holders(torch.empty(1))
