"""Counts the bytes of tensors while they live, on any device."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..forks import fork_safe_lock
from ..tensors.sparse import dense_parts
from ..tensors.trees import all_tensors
from ..torch_private import DispatchMode, call_in_mode


class _Known(weakref.ref[torch.UntypedStorage]):
    """A storage that has been seen, and the bytes that it counts for."""

    __slots__ = ("key", "num_bytes")
    key: int
    num_bytes: int


class LiveBytes(DispatchMode):
    """Counts what operations within it allocate, until it is freed.

    Memory that is there before is not counted, nor are what a kernel uses while it runs and what an
    allocator keeps for later. Several threads may be within it.

    Attributes:
        peak: the most at the end of any operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._lock = fork_safe_lock()
        self._known: dict[int, _Known] = {}
        # A storage that ends is only put here, by C. It may end anywhere in torch, where an
        # interrupt must find no line of Python.
        self._ended: deque[weakref.ref[torch.UntypedStorage]] = deque()

    @property
    def now(self) -> int:
        """The bytes that live now."""
        with self._lock:
            return self._count()

    def reset_peak(self) -> None:
        """Forgets what has been before."""
        with self._lock:
            self.peak = self._count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _dense((args, kwargs)):
            self._note(tensor, is_new=False)
        result = call_in_mode(func, args, kwargs)
        for tensor in _dense(result):
            self._note(tensor, is_new=True)
        return result

    def _note(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            known = self._known.get(storage._cdata)
            if known is not None and known() is storage:
                return
            known = _Known(storage, self._ended.append)
            known.key, known.num_bytes = storage._cdata, storage.nbytes() if is_new else 0
            self._now += known.num_bytes
            self._known[known.key] = known
            self.peak = max(self.peak, self._count())

    def _count(self) -> int:
        while self._ended:
            known = self._ended.popleft()
            assert isinstance(known, _Known)
            self._now -= known.num_bytes
            if self._known.get(known.key) is known:
                del self._known[known.key]
        return self._now


def _dense(tree: Any) -> Iterator[Tensor]:
    """The tensors of a tree; of a sparse one, such as an embedding's gradient, its parts."""
    for tensor in all_tensors(tree):
        yield from dense_parts(tensor)
