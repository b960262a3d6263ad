"""The settings of a stage's modules, which users may change between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...trace.state import TORCHS

# The id in place of a missing parameter.
_NONE = id(None)
# The place of the numbers among the settings.
_NUMBERS = 1
_PLAIN = (float, int, bool, str, type(None))


class Settings:
    """The modules in some layers, with their classes, modes, `requires_grad`, hooks and numbers.

    Such a number is the rate of a dropout, or whether a layer works in place. Strings count as
    numbers, and so does None where a number replaces it. The names of buffers are settings, too,
    and a forward that is an attribute of its module.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self.modules = [module for layer in layers for module in layer.modules()]
        self._ids = {id(module) for module in self.modules}
        # Dictionaries of attributes stay; those in them, such as `_modules`, may be replaced.
        self._attributes = [_attributes_of(module) for module in self.modules]
        self._numbers = [
            (held, name)
            for held in self._attributes
            for name, value in held.items()
            # Some attributes of torch's own are settings of their own here.
            if isinstance(value, _PLAIN) and name not in TORCHS
        ]
        self._then = self._now()

    def ids(self) -> set[int]:
        """The ids of the modules, and of the parameters that they have now."""
        found = {id(one) for held in self._attributes for one in held["_parameters"].values()}
        found |= self._ids
        found.discard(_NONE)
        return found

    def held(self) -> Iterator[nn.Module | nn.Parameter]:
        """The modules, and the parameters that they have now."""
        yield from self.modules
        yield from self.parameters()

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the modules have now; one of several modules comes several times."""
        # A generator would be called for each of them, in every step.
        return [
            one
            for held in self._attributes
            for one in held["_parameters"].values()
            if one is not None
        ]

    @property
    def compiled(self) -> bool:
        """Whether torch compiles any of the modules, in place or wrapped."""
        wrapped = any(type(module).__name__ == "OptimizedModule" for module in self.modules)
        return wrapped or any(call is not None for call in self._compiled())

    def _compiled(self) -> list[object]:
        return [module._compiled_call_impl for module in self.modules]

    def have_changed(self) -> bool:
        """Whether a setting has changed since this object was made."""
        return self._now() != self._then

    def now(self) -> Settings:
        """The present settings of the same layers: this object if none has changed."""
        return Settings(self._layers) if self.have_changed() else self

    def moved(self) -> set[tuple[int, str]]:
        """The numbers that have changed since this object was made, by the ids of their holders."""
        numbers = zip(self._numbers, self._then[_NUMBERS], strict=True)
        return {
            (id(held), name) for (held, name), then in numbers if _number(held.get(name)) != then
        }

    def is_like(self, other: Settings, but: set[tuple[int, str]]) -> bool:
        """Whether two objects, when they were made, had equal settings except these numbers."""
        return self._all_but(but) == other._all_but(but)

    def _all_but(self, but: set[tuple[int, str]]) -> list[object]:
        settings: list[object] = list(self._then)
        numbers = zip(self._numbers, self._then[_NUMBERS], strict=True)
        settings[_NUMBERS] = {
            (id(held), name): then for (held, name), then in numbers if (id(held), name) not in but
        }
        return settings

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._then == other._then

    __hash__ = None  # type: ignore[assignment]

    def _now(self) -> tuple[list[object], ...]:
        return (
            [module.training for module in self.modules],
            # A replayed step calls no function for a number, so that many cost next to nothing.
            [
                value if type(value := held.get(name)) in _PLAIN else _number(value)
                for held, name in self._numbers
            ],
            [number for held in self._attributes for number in held["_forward_pre_hooks"]],
            [number for held in self._attributes for number in held["_forward_hooks"]],
            self._compiled(),
            list(map(type, self.modules)),
            [held["forward"] for held in self._attributes if "forward" in held],
            [name for held in self._attributes for name in held["_buffers"]],
            [child for held in self._attributes for child in held["_modules"].values()],
            [
                parameter.requires_grad
                for held in self._attributes
                for parameter in held["_parameters"].values()
                if parameter is not None
            ],
        )


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module; one of TorchScript has tensors and modules elsewhere."""
    if not isinstance(module, torch.jit.ScriptModule):
        return vars(module)
    return {
        **vars(module),
        "_parameters": dict(module.named_parameters(recurse=False)),
        "_buffers": dict(module.named_buffers(recurse=False)),
        "_modules": dict(module.named_children()),
    }


def _number(value: object) -> object:
    """The number; None for any other value, since tensors do not compare as equal.

    So a cache that a first forward fills is not a change.
    """
    return value if isinstance(value, _PLAIN) else None
