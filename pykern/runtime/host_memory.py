"""Copies between the tensors of a stage and memory of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

# Pairs of a source and a destination.
CopyPairs = Sequence[tuple[Tensor, Tensor]]
# Returns when copies that have been issued are done.
UntilCopied = Callable[[], None]


class HostLink(Protocol):
    """Copies tensors of a stage to the host and back."""

    def buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Host memory for as many values as `like` has, in the same order."""

    def copy(self, pairs: CopyPairs, *, to_host: bool) -> UntilCopied:
        """Copies after torch's current stream. Do not write to the sources before the end."""

    def join(self) -> None:
        """Has torch's current stream wait for all copies."""


class OneMemory:
    """The link of a stage whose tensors are on the host."""

    def buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Memory for as many values as `like` has, in the same order."""
        return torch.empty_like(like, dtype=dtype)

    def copy(self, pairs: CopyPairs, *, to_host: bool) -> UntilCopied:
        """Copies at once."""
        del to_host
        for source, into in pairs:
            into.copy_(source)
        return self.join

    def join(self) -> None:
        """Does nothing: copies are done at once."""
