"""What captured layers hold, and where: a graph reads that, whatever they hold by now."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

# Compared by value: others of these would be computed with.
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device)


class Contents:
    """All that some modules hold, at one time.

    That is every attribute of a module and what is in its dictionaries, among them its parameters,
    buffers and hooks; of tensors, where they are. Values in tensors may change, for a graph reads
    them anew. What is deeper within other objects, such as the items of a list, is not looked at.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = [(name, _Contents(module)) for name, module in modules]

    def changed(self) -> str | None:
        """The name of a module that has come to hold something else, None if there is none."""
        return next((name for name, held in self._modules if held.have_changed()), None)


class _Contents:
    def __init__(self, module: nn.Module) -> None:
        attributes = vars(module)
        inner = [value for value in attributes.values() if isinstance(value, dict)]
        self._dictionaries = [attributes, *inner]
        # Kept, so that nothing new can be taken for them.
        self._values = self._now()
        self._tensors = [value for value in self._values if isinstance(value, Tensor)]
        self._places = [_place(tensor) for tensor in self._tensors]

    def have_changed(self) -> bool:
        now = self._now()
        if len(now) != len(self._values):
            return True
        if not all(map(is_, now, self._values)) and not all(map(_alike, now, self._values)):
            return True
        return any(map(_is_elsewhere, self._tensors, self._places))

    def _now(self) -> list[Any]:
        return [value for held in self._dictionaries for value in held.values()]


def _alike(now: object, then: object) -> bool:
    if now is then:
        return True
    return type(now) is type(then) and isinstance(then, _PLAIN) and now == then


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Where a tensor is and how it lies there, whether it calls hooks, where gradients go."""
    hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    calls = any(hooks)
    if tensor.layout is not torch.strided:
        return tensor.layout, calls
    main = getattr(tensor, "main_grad", None)
    gradients = None if main is None else _place(main)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), calls, gradients


def _is_elsewhere(tensor: Tensor, place: tuple[object, ...]) -> bool:
    return _place(tensor) != place
