"""Keys of calls: calls with equal keys are given tensors and other values alike."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..tensors.trees import Call, Spec, flatten
from .state import described


class Form:
    """How leaves are arranged, as a key: torch's descriptions of that cannot be hashed."""

    __slots__ = ("_spec",)

    def __init__(self, spec: Spec) -> None:
        self._spec = spec

    def __hash__(self) -> int:
        return self._spec.num_leaves

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self._spec == other._spec


def key_of_call(call: Call) -> tuple[list[Tensor], Hashable]:
    """The tensors that a call is given, each once, and the key of the call."""
    args, kwargs = call
    if not kwargs and all([isinstance(value, Tensor) for value in args]):
        # Most calls: torch's pytree would take longer than all else here.
        leaves: Sequence[Any] = args
        form = None
    else:
        leaves, spec = flatten(call)
        form = Form(spec)
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []
    given: list[Hashable] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            given.append(described(leaf))
            continue
        number = numbers.setdefault(id(leaf), len(tensors))
        if number == len(tensors):
            tensors.append(leaf)
        # A forward may ask whether a tensor is contiguous.
        layout = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        given.append((number, leaf.shape, layout, leaf.dtype, leaf.requires_grad))
    return tensors, (form, tuple(given))
