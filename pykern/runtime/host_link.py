"""Copies between the tensors of a stage and memory of the host, beside what the stage computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from . import cuda

# Each a source and where it goes.
Pairs = Sequence[tuple[Tensor, Tensor]]


class Copied(Protocol):
    """Copies that have been issued."""

    def wait(self) -> None:
        """Returns when they are done."""


class HostLink(Protocol):
    """How tensors of a stage get to the host and back."""

    def buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory of the host for as many values, in the same order."""

    def copy(self, pairs: Pairs, *, to_host: bool) -> Copied:
        """Copies, behind torch's current stream; nobody may write what is read before the end."""

    def join(self) -> None:
        """Has torch's current stream wait for all copies."""


class OneMemory:
    """The link of a stage whose tensors are on the host."""

    def buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for as many values, in the same order."""
        return torch.empty_like(like, dtype=dtype)

    def copy(self, pairs: Pairs, *, to_host: bool) -> Copied:
        """Copies at once."""
        del to_host
        for source, into in pairs:
            into.copy_(source)
        return _Done()

    def join(self) -> None:
        """Nothing is under way."""


class _Done:
    def wait(self) -> None:
        """They are done."""


class GpuLink:
    """The link of a stage on a lane: a stream of its GPU for each direction."""

    def __init__(self, gpus: cuda.Gpus, lane: int) -> None:
        self._gpus = gpus
        self._lane = lane

    def buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Pinned memory for as many values, in the same order."""
        # The strides of a tensor whose elements do not overlap and leave nothing between them.
        strides = torch.empty_like(like, device="meta").stride()
        storage = self._gpus.pinned(like.numel() * dtype.itemsize).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, like.size(), strides)

    def copy(self, pairs: Pairs, *, to_host: bool) -> Copied:
        """Issues the copies to the stream of their direction."""
        return _Issued(self._gpus.copy_beside(self._lane, pairs, to_host=to_host))

    def join(self) -> None:
        """Has torch's current streams wait for the copies of all lanes."""
        self._gpus.join_beside()


class _Issued:
    def __init__(self, end: cuda.Event) -> None:
        self._end = end

    def wait(self) -> None:
        """Waits on the host."""
        self._end.synchronize()
