"""The tensors that a recompute reads again, when the backward of a call comes later.

A graph has saved such a tensor, or refuses its backward once the tensor is written. A recompute
runs with the values that it finds, so it needs the same refusal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..torch_private import version_of


class ReadAgain:
    """The batch, buffers and frozen parameters of a call, as its forwards leave them.

    Parameters that train have aliases for the call (`Aliases`), which know of writes. Buffers that
    forwards write are left out: a recompute has the values that they had before.

    Args:
        modules: the modules that are about to run.
        batch: the tensors of the batch.
    """

    def __init__(self, modules: Iterable[nn.Module], batch: Iterable[Tensor]) -> None:
        self._held: list[tuple[dict[str, Any], str, Tensor | None, int]] = [
            (held, name, tensor, _writes_of(tensor))
            for module in modules
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is None or not tensor.requires_grad
        ]
        self._batch = [(tensor, version_of(tensor)) for tensor in batch]

    def end_forwards(self) -> None:
        """Takes the tensors as they are now, but for those that the forwards have written."""
        self._held = [place for place in self._held if _is_unchanged(*place)]
        self._batch = [(tensor, version_of(tensor)) for tensor, _ in self._batch]

    def require_unchanged(self) -> None:
        """Raises RuntimeError if a tensor was written or replaced since the forwards."""
        changed = [repr(place[1]) for place in self._held if not _is_unchanged(*place)]
        if any(version_of(tensor) != then for tensor, then in self._batch):
            changed.append("the batch")
        if changed:
            raise RuntimeError(
                "batch, buffers and frozen parameters must stay as they are from forward to "
                f"backward, got changes of {', '.join(changed[:3])}, with which recompute would "
                "run the forward again. Change them after the backward"
            )


def _writes_of(tensor: Tensor | None) -> int:
    return 0 if tensor is None else version_of(tensor)


def _is_unchanged(held: dict[str, Any], name: str, tensor: Tensor | None, writes: int) -> bool:
    return held.get(name) is tensor and _writes_of(tensor) == writes
