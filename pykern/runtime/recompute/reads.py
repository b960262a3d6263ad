"""Finds tensors of earlier calls that later calls read without getting them as arguments."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...tensors.trees import all_tensors, tensors_of
from ...torch_private import DispatchMode, call_in_mode
from ...trace.reach import places_of


class Reads(DispatchMode):
    """Notes tensors that pass from one call to a later call other than as returned values.

    Args:
        given: the arguments of the first call.

    Attributes:
        crossed: the calls behind which a tensor passes in this way.
    """

    def __init__(self, given: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.crossed: set[int] = set()
        # By address: the storage, unless a new storage has its memory now, and its call.
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._returned: list[set[int]] = []
        for storage in _storages(tensors_of(given)):
            self._made[storage._cdata] = weakref.ref(storage), 0

    def after(self, value: Any) -> None:
        """Takes the returned value of the next call."""
        self._returned.append(memory_of(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = {storage._cdata: storage for storage in _storages((args, kwargs))}
        for storage in read.values():
            self._read(storage)
        result = call_in_mode(func, args, kwargs)
        for storage in _storages(result):
            if storage._cdata not in read:
                self._made[storage._cdata] = weakref.ref(storage), len(self._returned)
        return result

    def _read(self, storage: torch.UntypedStorage) -> None:
        known, call = self._made.get(storage._cdata, (None, 0))
        if known is not None and known() is storage:
            later = range(call, len(self._returned))
            self.crossed.update(at for at in later if storage._cdata not in self._returned[at])


class Unread(nullcontext[None]):
    """Watches nothing, and assumes that tensors pass behind every call."""

    def __init__(self) -> None:
        super().__init__()
        self.crossed: set[int] = set()

    def after(self, value: Any) -> None:
        """Takes the returned value of the next call."""
        del value
        self.crossed.add(len(self.crossed))


def memory_of(value: Any) -> set[int]:
    """The addresses of the storages of the tensors in a tree."""
    return {storage._cdata for storage in _storages(tensors_of(value))}


def memory_kept_by(modules: Iterable[nn.Module]) -> set[int]:
    """The addresses of storages that modules hold outside parameters and buffers."""
    held = [each for place in places_of(modules).values() for each in place.read().values()]
    return memory_of([each for each in held if isinstance(each, Tensor)])


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in all_tensors(tree):
        if tensor.layout is torch.strided:
            yield tensor.untyped_storage()
