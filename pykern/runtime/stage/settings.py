"""The settings of a stage's modules, which users may change between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

# The id in place of a missing parameter.
_NONE = id(None)
# The place of the numbers among the settings.
_NUMBERS = 1
_PLAIN = (float, int, bool)


class Settings:
    """The modules in some layers, with their modes, `requires_grad`, hooks and numbers.

    Such a number is the rate of a dropout, or whether a layer works in place.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self.modules = [module for layer in layers for module in layer.modules()]
        self._ids = {id(module) for module in self.modules}
        # The dictionaries are looked up once: the check in every step must cost next to nothing.
        self._children = [module._modules for module in self.modules]
        self._parameters = [module._parameters for module in self.modules]
        self._hooks = [
            hooks
            for module in self.modules
            for hooks in (module._forward_pre_hooks, module._forward_hooks)
        ]
        self._numbers = [
            (vars(module), name)
            for module in self.modules
            for name, value in vars(module).items()
            if isinstance(value, int | float) and name != "training"
        ]
        self._then = self._now()

    def ids(self) -> set[int]:
        """The ids of the modules, and of the parameters that they have now."""
        found = {id(held) for parameters in self._parameters for held in parameters.values()}
        found |= self._ids
        found.discard(_NONE)
        return found

    def held(self) -> Iterator[nn.Module | nn.Parameter]:
        """The modules, and the parameters that they have now."""
        yield from self.modules
        yield from self.parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that the modules have now; one of several modules comes several times."""
        for parameters in self._parameters:
            yield from (held for held in parameters.values() if held is not None)

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
            [number for hooks in self._hooks for number in hooks],
            self._compiled(),
            [child for children in self._children for child in children.values()],
            [
                parameter.requires_grad
                for parameters in self._parameters
                for parameter in parameters.values()
                if parameter is not None
            ],
        )


def _number(value: object) -> object:
    """The number, or the type of its replacement, since tensors do not compare as equal."""
    return value if isinstance(value, int | float) else type(value)
