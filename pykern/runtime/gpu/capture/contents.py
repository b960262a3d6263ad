"""The contents and addresses of captured layers, which a graph reads even after changes.

They are compared before every replay. Lists of all modules are made and compared by functions of
C's alone, so that no function of Python's is called for a module or a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, Self

import torch
from torch import Tensor, nn

# Attributes of these types are compared by value, because a graph has their values fixed.
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device)

_FORM = attrgetter("dtype", "shape")
_HOOKS = attrgetter("_backward_hooks")
_LATE_HOOKS = attrgetter("_post_accumulate_grad_hooks")


class Contents:
    """A snapshot of the contents of some modules.

    The snapshot has every attribute of a module and the values of its dictionaries, among them
    parameters, buffers and hooks. For tensors it has addresses, not values: each replay reads
    values anew. Objects nested deeper, such as the items of a list, are not compared.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._each = [(name, _Snapshot.of(module)) for name, module in modules]
        self._all = _Snapshot.joined([snapshot for _, snapshot in self._each])

    def changed(self) -> str | None:
        """The name of a module whose contents have changed; None if all are unchanged."""
        if not self._all.has_changed():
            return None
        return next(name for name, snapshot in self._each if snapshot.has_changed())


@dataclass
class _Snapshot:
    """The values of some dictionaries, and the places of the tensors among them.

    Attributes:
        dictionaries: of modules.
        values: of the dictionaries. They are kept, so that no new object can have the identity of
            an old one.
        tensors: among the values.
        hooks: whether each tensor had hooks.
        strided: the tensors with an address.
        places: their addresses and layouts, and whether they had a `main_grad`.
        mains: the same of each `main_grad`.
    """

    dictionaries: list[dict[Any, Any]]
    values: list[Any]
    tensors: list[Tensor]
    hooks: list[Any]
    strided: list[Tensor]
    places: list[Any]
    mains: list[Any]

    @classmethod
    def of(cls, module: nn.Module) -> Self:
        attributes = vars(module)
        inner = [value for value in attributes.values() if isinstance(value, dict)]
        dictionaries = [attributes, *inner]
        values = _values(dictionaries)
        tensors = [value for value in values if isinstance(value, Tensor)]
        strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
        places, mains = _places(strided), _places(_mains(strided))
        return cls(dictionaries, values, tensors, _hooks(tensors), strided, places, mains)

    @classmethod
    def joined(cls, snapshots: Sequence[_Snapshot]) -> Self:
        names = [field.name for field in fields(cls)]
        return cls(*(list(chain.from_iterable(map(attrgetter(name), snapshots))) for name in names))

    def has_changed(self) -> bool:
        now = _values(self.dictionaries)
        return (
            len(now) != len(self.values)
            or not (all(map(is_, now, self.values)) or all(map(_alike, now, self.values)))
            or _hooks(self.tensors) != self.hooks
            or _places(self.strided) != self.places
            or _places(_mains(self.strided)) != self.mains
        )


def _values(dictionaries: Iterable[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dictionaries)))


def _alike(now: object, then: object) -> bool:
    if now is then:
        return True
    return type(now) is type(then) and isinstance(then, _PLAIN) and now == then


def _hooks(tensors: Sequence[Tensor]) -> list[Any]:
    late = map(bool, map(_LATE_HOOKS, tensors))
    return list(zip(map(bool, map(_HOOKS, tensors)), late, strict=True))


def _places(tensors: Sequence[Tensor]) -> list[Any]:
    strides = map(Tensor.stride, tensors)
    without = map(is_, _all_mains(tensors), repeat(None))
    addresses = map(Tensor.data_ptr, tensors)
    return list(zip(addresses, map(_FORM, tensors), strides, without, strict=True))


def _mains(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [main for main in _all_mains(tensors) if main is not None]


def _all_mains(tensors: Sequence[Tensor]) -> Iterable[Tensor | None]:
    return map(getattr, tensors, repeat("main_grad"), repeat(None))
