"""The contents and addresses of captured layers, which a graph reads even after changes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

# Attributes of these types are compared by value, because a graph has their values fixed.
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device)


class Contents:
    """A snapshot of the contents of some modules.

    The snapshot has every attribute of a module and the values of its dictionaries, among them
    parameters, buffers and hooks. For tensors it has addresses, not values: each replay reads
    values anew. Objects nested deeper, such as the items of a list, are not compared.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = [(name, _Contents(module)) for name, module in modules]

    def changed(self) -> str | None:
        """The name of a module whose contents have changed; None if all are unchanged."""
        return next((name for name, held in self._modules if held.have_changed()), None)


class _Contents:
    def __init__(self, module: nn.Module) -> None:
        attributes = vars(module)
        inner = [value for value in attributes.values() if isinstance(value, dict)]
        self._dictionaries = [attributes, *inner]
        # References are kept, so that no new object can have the identity of an old one.
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
    """A tensor's address and layout, whether it has hooks, and the place of its `main_grad`."""
    hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    calls = any(hooks)
    if tensor.layout is not torch.strided:
        return tensor.layout, calls
    main = getattr(tensor, "main_grad", None)
    gradients = None if main is None else _place(main)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), calls, gradients


def _is_elsewhere(tensor: Tensor, place: tuple[object, ...]) -> bool:
    return _place(tensor) != place
