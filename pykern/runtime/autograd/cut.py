"""Cuts the autograd graph of a microbatch, between two stages or within one stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...tensors.trees import flatten, map_tensors, opened, tensors_of

# The alignment of allocators, in bytes.
_BORDER = 64


@dataclass(slots=True)
class Cut:
    """A value with the graph before it and the leaves that the graph behind it begins at.

    Attributes:
        value: the value behind the cut, with detached tensors.
        outputs: the tensors before the cut that require grad.
        leaves: for each output, the leaf behind the cut.
    """

    value: Any
    outputs: Sequence[Tensor]
    leaves: Sequence[Tensor]


def cut(value: Any, carry: Callable[[Sequence[Tensor]], Sequence[Tensor]] | None = None) -> Cut:
    """Cuts the graph behind a value.

    Args:
        value: any tree. A tensor that occurs twice stays one tensor: two would add up their
            gradients in another order, and an in-place layer would change only one of them.
        carry: moves the detached tensors to their reader; None for no move.
    """
    if isinstance(value, Tensor):
        leaf = value.detach()
        if carry is not None:
            (leaf,) = carry((leaf,))
        if not value.requires_grad:
            return Cut(leaf, (), ())
        return Cut(leaf, (value,), (leaf.requires_grad_(),))
    values, together = opened(value)
    unique = tensors_of(values)
    landed: Sequence[Tensor] = [tensor.detach() for tensor in unique]
    if carry is not None:
        landed = carry(landed)
    pairs = list(zip(unique, landed, strict=True))
    leaves = [leaf.requires_grad_() for tensor, leaf in pairs if tensor.requires_grad]
    handed = {id(tensor): leaf for tensor, leaf in pairs}
    values = [handed.get(id(value), value) for value in values]
    outputs = tuple([tensor for tensor in unique if tensor.requires_grad])
    return Cut(together(values), outputs, leaves)


def hidden_in(value: Any) -> list[object]:
    """The objects in a tree that hold tensors of a graph, and that pytree does not open."""
    if isinstance(value, Tensor):
        return []
    return [leaf for leaf in flatten(value)[0] if _holds_a_graph(leaf)]


def _holds_a_graph(leaf: object) -> bool:
    held = getattr(leaf, "__dict__", {}).values()
    return not isinstance(leaf, Tensor) and any(
        isinstance(tensor, Tensor) and tensor.requires_grad for tensor in held
    )


def copies(value: Any) -> Any:
    """The value with copies of its tensors; a tensor that occurs twice has one copy."""
    made: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = copy_in_graph(tensor)
        return made[id(tensor)]

    return map_tensors(copy, value)


def copy_in_graph(tensor: Tensor) -> Tensor:
    """A copy that leads to the tensor in the graph, in the same strides if no elements coincide.

    The copy has the same memory alignment, because kernels may choose their order of sums by it.
    """
    copied = tensor.clone()
    start = tensor.data_ptr() % _BORDER // tensor.element_size()
    if 0 in tensor.stride() or tensor.numel() == 0:
        return copied
    if copied.stride() == tensor.stride() and start == 0:
        return copied
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    room = torch.empty(start + last + 1, dtype=tensor.dtype, device=tensor.device)
    return room.as_strided(tensor.shape, tensor.stride(), start).copy_(tensor)
