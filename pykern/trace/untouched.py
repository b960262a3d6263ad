"""A run of a model that leaves no trace in it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from .. import _C
from ..modes import random_states, set_states
from .errors import CutError, Unsettled
from .generators import Generators
from .state import attributes

# An attribute of parameters that belongs to the backward, not to a forward.
_GRADIENT = "main_grad"


class Untouched:
    """State that a run of a model may change, to be put back: buffers, attributes, random numbers.

    Args:
        model: the whole.
        opened: those of its modules that may not leave tensors in attributes: what they do is
            repeated, and this would not be.
        settling: whether these keep what they have changed in their attributes, beside tensors.

    Attributes:
        generators: beside torch's default ones.
    """

    def __init__(
        self, model: nn.Module, opened: Collection[nn.Module], *, settling: bool = False
    ) -> None:
        self._settling = settling
        modules = list(model.modules())
        self._described = {module: attributes(module, 1) for module in opened}
        self._kept = [(holder, kept_of(holder)) for holder in holders_of(modules)]
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
        self._numbers = random_states(devices)
        self.generators = Generators(model)

    def kept(self) -> AbstractContextManager[object]:
        """A context, behind which all is as it was."""
        return _C.Undo(self._put_back)

    def _put_back(self) -> None:
        set_states(self._numbers)
        self.generators.put_back()
        for holder, before in self._kept:
            if not self._settling or holder not in self._described:
                put_back(holder, before)
        # By `.data`, beside any graph, in one mode or another. It counts no write either: the value
        # is what it was, and a buffer that nothing else has written must not look written.
        for buffer, value in self._buffers:
            buffer.data.copy_(value)

    def require(self) -> None:
        """Raises CutError where an opened module has left a tensor in an attribute, or changed one.

        To be called before all is put back.
        """
        left: list[str] = []
        changed: list[str] = []
        for module, before in self._kept:
            if isinstance(module, nn.Module) and module in self._described:
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


def holders_of(modules: Iterable[nn.Module]) -> list[nn.Module | nn.Parameter]:
    """Modules, and parameters with attributes: a forward may change the attributes of both.

    The first forward of a quantised layer may take its scales from the attributes of a parameter.
    """
    modules = list(modules)
    parameters = {each: None for module in modules for each in module.parameters(recurse=False)}
    return [*modules, *(each for each in parameters if vars(each))]


def kept_of(holder: nn.Module | nn.Parameter) -> dict[str, Any]:
    """The attributes of a module or parameter, for `put_back`."""
    return {
        name: value.copy() if isinstance(value, dict | list) else value
        for name, value in vars(holder).items()
        if name != _GRADIENT
    }


def _left(module: nn.Module, before: dict[str, Any]) -> list[str]:
    now = {**vars(module), **module._buffers}
    then = {**before, **before["_buffers"]}
    return [
        name
        for name, value in now.items()
        if isinstance(value, Tensor) and value is not then.get(name)
    ]


def _changed(module: nn.Module, before: dict[str, Hashable]) -> list[str]:
    """Attributes that are not what they were; those that are new were made for this run."""
    now = attributes(module, 1)
    return [
        f"{type(module).__name__}.{name}"
        for name, value in before.items()
        if name in now and now[name] != value
    ]


def put_back(holder: nn.Module | nn.Parameter, before: dict[str, Any]) -> None:
    """Gives a module or parameter the attributes that it had, dicts and lists with their parts."""
    now = vars(holder)
    for name in now.keys() - before.keys() - {_GRADIENT}:
        del now[name]
    for name, value in before.items():
        held = now.get(name)
        if isinstance(value, dict) and isinstance(held, dict):
            # The dictionary itself may be known elsewhere.
            held.clear()
            held.update(value)
        elif isinstance(value, list) and isinstance(held, list):
            held[:] = value
        else:
            now[name] = value
