"""What may be changed on the modules of a stage between steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class Settings:
    """The modules in some layers, with their modes, what they train, their hooks and numbers.

    Such a number is the rate of a dropout, or whether a layer works in place.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.modules = [module for layer in layers for module in layer.modules()]
        # Looked up once: asking every step what has changed must cost next to nothing.
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

    def held(self) -> dict[int, nn.Module | nn.Parameter]:
        """The modules, and the parameters that they have now, by their ids."""
        held: dict[int, nn.Module | nn.Parameter] = {id(module): module for module in self.modules}
        for parameters in self._parameters:
            for parameter in parameters.values():
                if parameter is not None:
                    held[id(parameter)] = parameter
        return held

    def have_changed(self) -> bool:
        """Whether anything has changed since this was made."""
        return self._now() != self._then

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Settings) and self._then == other._then

    __hash__ = None  # type: ignore[assignment]

    def _now(self) -> tuple[list[object], ...]:
        return (
            [module.training for module in self.modules],
            [_number(held.get(name)) for held, name in self._numbers],
            [number for hooks in self._hooks for number in hooks],
            [child for children in self._children for child in children.values()],
            [
                parameter.requires_grad
                for parameters in self._parameters
                for parameter in parameters.values()
                if parameter is not None
            ],
        )


def _number(value: object) -> object:
    """A number, or what is in its place by now: a tensor is equal to nothing."""
    return value if isinstance(value, int | float) else type(value)
