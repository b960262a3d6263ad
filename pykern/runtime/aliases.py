"""Aliases of parameters: other leaves that replace a model's parameters during one call.

Graphs of that call end in the aliases, which collect their own gradients. So the backward outside
gets the complete gradient of a parameter at once, as from any other operation: the parameter's
hooks are called once, and `torch.autograd.grad` does not change `.grad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from ..tensors.parameters import with_values
from ..torch_private import version_of


class Aliases:
    """An alias of each parameter that trains, with its values and its count of writes.

    Args:
        modules: the modules that may have parameters, registered or in attributes.

    Attributes:
        originals: the parameters.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.originals: list[nn.Parameter] = []
        self._aliases: list[nn.Parameter] = []
        self._alias_of: dict[int, nn.Parameter] = {}
        # The places of parameters, by dictionary and key, each with its alias.
        self._places: list[tuple[dict[str, Any], str, object]] = []
        # The same places, with the objects that the aliases have replaced.
        self._before: list[tuple[dict[str, Any], str, object]] = []
        modules = list(modules)
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    self._places.append((module._parameters, name, self._of(parameter)))
        for module in modules:
            self._places += self._in_attributes(vars(module))
        self._writes: list[int] = []
        # The address of each alias's memory while the aliases are in place.
        self._memory: list[int] = []

    def _of(self, original: nn.Parameter) -> nn.Parameter:
        alias = self._alias_of.get(id(original))
        if alias is None:
            alias = self._alias_of[id(original)] = with_values(original, original.detach())
            self.originals.append(original)
            self._aliases.append(alias)
        return alias

    def _in_attributes(
        self, attributes: dict[str, Any]
    ) -> Iterator[tuple[dict[str, Any], str, object]]:
        """Other places of parameters: recurrent modules have theirs in a list, too."""
        for name, there in attributes.items():
            kind = type(there)
            if kind is list or kind is tuple:
                instead = kind(self._alias_of.get(id(one), one) for one in there)
                if any(one is not other for one, other in zip(there, instead, strict=True)):
                    yield attributes, name, instead
            elif kind is nn.Parameter and id(there) in self._alias_of:
                yield attributes, name, self._alias_of[id(there)]

    def in_place(self) -> _C.Undo:
        """A context that puts the parameters back at its end; call `take_place` within."""
        return _C.Undo(self._put_back)

    def take_place(self) -> None:
        """Replaces the parameters by their aliases."""
        self._memory = [address_of(alias) for alias in self._aliases]
        for held, name, instead in self._places:
            self._before.append((held, name, held[name]))
            held[name] = instead

    def _put_back(self) -> None:
        for held, name, there in reversed(self._before):
            held[name] = there
        self._before.clear()
        # A forward may have given a parameter other memory, as `self.weight.data = ...` does.
        for alias, original, memory in zip(
            self._aliases, self.originals, self._memory, strict=False
        ):
            if address_of(alias) != memory:
                original.data = alias.data
        self._memory = []

    def end_forwards(self) -> None:
        """Takes the parameters as they are now, since forwards may write their own."""
        self._writes = [version_of(original) for original in self.originals]

    @property
    def written(self) -> bool:
        """Whether a parameter has been written since the forwards."""
        return self._writes != [version_of(original) for original in self.originals]

    def take_gradients(self) -> Sequence[Tensor | None]:
        """The gradients that the aliases have collected."""
        found = [alias.grad for alias in self._aliases]
        for alias in self._aliases:
            alias.grad = None
        return found


def address_of(parameter: nn.Parameter) -> int:
    """The address of a parameter's memory; 0 for one that keeps its values in other tensors."""
    is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    return parameter.data_ptr() if is_plain else 0
