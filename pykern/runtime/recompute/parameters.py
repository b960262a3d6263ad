"""Parameters that forwards write, and that recompute would write again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...tensors.sparse import are_equal
from ...torch_private import is_traceable_wrapper_subclass, storage_of, version_of

# A second write may round anew, as that of an embedding with `max_norm` does.
_ROUNDINGS = 16


class WrittenParameter(NamedTuple):
    """A parameter that a forward has written, and where it is."""

    module: nn.Module
    name: str


class ParametersBefore:
    """The parameters of some modules before a forward."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # The alias keeps the storage, whose address another one could get.
        self._then = [
            (module, name, held, version_of(held), held.detach())
            for module in modules
            for name, held in module._parameters.items()
            if held is not None
        ]

    def written(self) -> list[WrittenParameter]:
        """Those that train and that the forward has written.

        Raises:
            RuntimeError: it has written one that does not train, as forwards do that average others
                in it, such as a teacher's weights. A recompute would write it again.
        """
        found = []
        for module, name, held, version, alias in self._then:
            # Wrappers of other tensors have no storage. `held.data = ...` gives another one.
            is_bare = not is_traceable_wrapper_subclass(held)
            is_moved = is_bare and storage_of(held) != storage_of(alias)
            if not is_moved and version_of(held) == version:
                continue
            if not held.requires_grad:
                raise RuntimeError(
                    "forwards must leave parameters alone under recompute, which runs them twice, "
                    f"got a write to {name!r} of a {type(module).__name__}. Write it between "
                    "steps, make it a buffer, or leave out recompute"
                )
            found.append(WrittenParameter(module, name))
        return found


class WrittenAgain:
    """A context in which calls write parameters a second time, which must change nothing."""

    def __init__(self, written: Sequence[WrittenParameter]) -> None:
        self._written = written
        self._before: list[Tensor] = []

    def __enter__(self) -> None:
        self._before = [_value(one).clone() for one in self._written]

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pairs = zip(self._written, self._before, strict=True)
        self._before = []
        for one, before in pairs if kind is None else ():
            if not _is_near(_value(one), before):
                raise RuntimeError(
                    f"{one.name!r} of a {type(one.module).__name__} must keep its value when its "
                    "forward writes it once more under recompute, got another. Write it between "
                    "steps, or leave out recompute"
                )


def _value(of: WrittenParameter) -> Tensor:
    parameter = of.module._parameters[of.name]
    assert parameter is not None
    return parameter.detach()


def _is_near(now: Tensor, before: Tensor) -> bool:
    if now.dtype.is_floating_point or now.dtype.is_complex:
        tolerance = _ROUNDINGS * torch.finfo(now.dtype).eps
        return torch.allclose(now, before, rtol=tolerance, atol=0, equal_nan=True)
    return are_equal(now, before)
