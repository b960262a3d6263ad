"""Finds the tensors that a call writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from ..torch_private import version_of
from .origins import storages_of


class Writes:
    """Watches tensors for writes from now on.

    Args:
        tensors: those.
        seen: by address of memory, how many operations have written it. Tensors of inference mode
            count no writes themselves.
    """

    def __init__(self, tensors: Iterable[Tensor], seen: Mapping[int, int]) -> None:
        self._seen = seen
        self._tensors = {id(tensor): (tensor, self._count(tensor)) for tensor in tensors}

    def found(self) -> list[Tensor]:
        """Those that have been written by now."""
        return [tensor for tensor, count in self._tensors.values() if self._count(tensor) != count]

    def _count(self, tensor: Tensor) -> int:
        if not tensor.is_inference():
            return version_of(tensor)
        return sum(self._seen.get(storage._cdata, 0) for storage in storages_of(tensor))
