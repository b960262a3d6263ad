"""Finds the tensors that a call writes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ..torch_private import version_of


class Writes:
    """Watches tensors for writes from now on."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = {id(tensor): (tensor, version_of(tensor)) for tensor in tensors}

    def found(self) -> list[Tensor]:
        """Those that have been written by now."""
        return [
            tensor for tensor, version in self._tensors.values() if version_of(tensor) != version
        ]
