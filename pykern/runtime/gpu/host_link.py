"""Copies between the tensors of a stage on a GPU and memory of the host, beside its actions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host_memory import CopyPairs, UntilCopied
from . import cuda


class GpuLink:
    """The link of a stage on a lane: a stream of its GPU for each direction."""

    def __init__(self, gpus: cuda.Gpus, lane: int) -> None:
        self._gpus = gpus
        self._lane = lane

    def buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Pinned memory for as many values as `like` has, in the same order."""
        # The strides of a dense tensor without overlaps.
        strides = torch.empty_like(like, device="meta").stride()
        storage = self._gpus.pinned(like.numel() * dtype.itemsize).untyped_storage()
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, like.size(), strides)

    def copy(self, pairs: CopyPairs, *, to_host: bool) -> UntilCopied:
        """Issues the copies on the stream of their direction."""
        return self._gpus.copy_beside(self._lane, pairs, to_host=to_host).wait

    def join(self) -> None:
        """Has torch's current streams wait for the copies of all lanes."""
        self._gpus.join_beside()
