"""Counts the bytes of tensors while they live, on any device."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from ..tensors.trees import all_tensors
from ..torch_private import DispatchMode


class LiveBytes(DispatchMode):
    """Counts what operations within it allocate, until it is freed.

    Memory that is there before is not counted, nor are what a kernel uses while it runs and what an
    allocator keeps for later. Several threads may be within it.

    Attributes:
        now: bytes that live now.
        peak: the most at the end of any operation.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        # Reentrant, because a storage may end while this thread holds it.
        self._lock = threading.RLock()
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Forgets what has been before."""
        with self._lock:
            self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in all_tensors((args, kwargs)):
            self._note(tensor, is_new=False)
        result = func(*args, **kwargs)
        for tensor in all_tensors(result):
            self._note(tensor, is_new=True)
        return result

    def _note(self, tensor: Tensor, *, is_new: bool) -> None:
        storage = tensor.untyped_storage()
        with self._lock:
            known = self._known.get(storage._cdata)
            if known is not None and known() is storage:
                return
            num_bytes = storage.nbytes() if is_new else 0
            self._known[storage._cdata] = weakref.ref(storage)
            weakref.finalize(storage, self._forget, storage._cdata, num_bytes)
            self.now += num_bytes
            self.peak = max(self.peak, self.now)

    def _forget(self, key: int, num_bytes: int) -> None:
        with self._lock:
            self.now -= num_bytes
            known = self._known.get(key)
            if known is not None and known() is None:
                del self._known[key]
