"""A run of a model that leaves no trace in it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from .errors import CutError, Unsettled
from .kept_state import KeptState
from .state import attributes


class Untouched:
    """State that a run of a model may change, to be put back: tensors, attributes, random numbers.

    Args:
        model: the whole.
        opened: those of its modules that may not leave tensors in attributes: what they do is
            repeated, and this would not be.
        settling: whether these keep what they have changed in their attributes, beside tensors.
        writing: whether the run may write parameters, which then count as well.

    Attributes:
        generators: beside torch's default ones.
    """

    def __init__(
        self,
        model: nn.Module,
        opened: Collection[nn.Module],
        *,
        settling: bool = False,
        writing: bool = True,
    ) -> None:
        self._settling = settling
        self._described = {module: attributes(module) for module in opened}
        self._held = {module: _held(module) for module in opened}
        devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        settled = opened if settling else ()
        self._state = KeptState(model.modules(), devices, settled=settled, writing=writing)
        self.generators = self._state.generators

    def kept(self) -> AbstractContextManager[object]:
        """A context, behind which all is as it was."""
        return self._state.kept()

    def require(self) -> None:
        """Raises CutError where an opened module has left a tensor in an attribute, or changed one.

        To be called before all is put back.
        """
        left: list[str] = []
        changed: list[str] = []
        for module, before in self._held.items():
            changed += _changed(module, self._described[module])
            left += [f"{type(module).__name__}.{name}" for name in _left(module, before)]
        if left:
            raise CutError(
                f"the forward leaves a tensor in {_listed(left)}, which would not be repeated for "
                "each microbatch. Return it, or do that within a module that stays whole"
            )
        if changed and not self._settling:
            raise Unsettled(
                f"the forward changes {_listed(changed)}, which would not be repeated for each "
                "microbatch. Do that within a module that stays whole, or outside of the model. "
                "If the forward does so in its first call only, call the model once before"
            )


def _listed(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _held(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._buffers}


def _left(module: nn.Module, before: Mapping[str, Any]) -> list[str]:
    return [
        name
        for name, value in _held(module).items()
        if isinstance(value, Tensor) and value is not before.get(name)
    ]


def _changed(module: nn.Module, before: dict[str, Hashable]) -> list[str]:
    """Attributes that are not what they were; those that are new were made for this run."""
    now = attributes(module)
    return [
        f"{type(module).__name__}.{name}"
        for name, value in before.items()
        if name in now and now[name] != value
    ]
