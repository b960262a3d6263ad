"""Parameters under other names: leaves in the place of a model's parameters, for one call of it.

Graphs that are made meanwhile end in the aliases, which collect gradients of their own. So an
engine outside gets the gradient of a parameter once, complete, as from any other operation: its
hooks are called once, and `torch.autograd.grad` leaves `.grad` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import _C
from ..torch_private import version_of

# What every module has; its parameters are among these.
_OF_MODULES = frozenset(vars(nn.Module()))


class Aliases:
    """An alias of each parameter that trains, with its values and its count of writes.

    Args:
        modules: those that may have the parameters, in dictionaries of their own or in attributes.

    Attributes:
        originals: the parameters.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list({id(module): module for module in modules}.values())
        held = (one for module in self._modules for one in module._parameters.values())
        trained = {id(one): one for one in held if one is not None and _trains(one)}
        self.originals = list(trained.values())
        self._aliases = [_alias(original) for original in self.originals]
        self._alias_of = {
            id(original): alias
            for original, alias in zip(self.originals, self._aliases, strict=True)
        }
        self._writes = [version_of(original) for original in self.originals]
        # What has been replaced: in which dictionary, under which key, and what was there.
        self._replaced: list[tuple[dict[str, Any], str, object]] = []

    def in_place(self) -> _C.Undo:
        """A context at whose end the parameters are where they were; `take_place` begins it."""
        return _C.Undo(self._put_back)

    def take_place(self) -> None:
        """Puts the aliases where the parameters are."""
        for module in self._modules:
            for held, name, there in _held(module):
                instead = self._instead(there)
                if instead is not there:
                    self._replaced.append((held, name, there))
                    held[name] = instead

    def _put_back(self) -> None:
        for held, name, there in reversed(self._replaced):
            held[name] = there
        self._replaced.clear()

    def _instead(self, there: Any) -> Any:
        if type(there) in (list, tuple):
            others = [self._alias_of.get(id(one), one) for one in there]
            changed = any(one is not other for one, other in zip(there, others, strict=True))
            return type(there)(others) if changed else there
        return self._alias_of.get(id(there), there)

    @property
    def written(self) -> bool:
        """Whether a parameter has been written since."""
        return self._writes != [version_of(original) for original in self.originals]

    def take_gradients(self) -> Sequence[Tensor | None]:
        """What the aliases have collected."""
        found = [alias.grad for alias in self._aliases]
        for alias in self._aliases:
            alias.grad = None
        return found


def _trains(parameter: nn.Parameter) -> bool:
    # One that is lazy gets its values in the first forward, and its gradients itself.
    return parameter.requires_grad and not is_lazy(parameter)


def _alias(original: nn.Parameter) -> nn.Parameter:
    alias = nn.Parameter(original.detach())
    vars(alias).update(vars(original))
    return alias


def _held(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, object]]:
    """Where a module has parameters: recurrent ones have them in a list as well."""
    yield from [(module._parameters, *item) for item in module._parameters.items()]
    attributes = vars(module)
    for name, there in list(attributes.items()):
        if name not in _OF_MODULES and isinstance(there, list | tuple | nn.Parameter):
            yield attributes, name, there
