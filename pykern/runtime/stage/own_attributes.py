"""Attributes that forwards assign to modules, such as counters; on copies of modules as well."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

from torch import Tensor, nn

from ...tensors.sparse import are_equal
from ...trace.state import TORCHS
from ..recompute.buffers import modules_in
from .layer_copies import parts_of

# The number of a module, and the name of its attribute.
AttributePlace = tuple[int, str]

MISSING = object()


class OwnAttributes:
    """The attributes of some modules as they are now, without those that every module has.

    An object that is changed in place, such as a list, stays the same attribute. References to
    parameters, which recurrent layers renew by themselves, are those of each copy.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._held = [vars(module) for module in modules]
        self._then = [held.copy() for held in self._held]

    def changed(self) -> list[AttributePlace]:
        """The attributes that were assigned or deleted since."""
        return [
            (number, name)
            for number, (held, then) in enumerate(zip(self._held, self._then, strict=True))
            # Nearly all modules assign nothing, and have no name looked up.
            if len(held) != len(then) or not all(map(is_, held.values(), then.values()))
            for name in dict.fromkeys((*then, *held))
            if name not in TORCHS
            for one, other in [(held.get(name, MISSING), then.get(name, MISSING))]
            if one is not other and not _refers(one) and not _refers(other)
        ]

    def tensors(self) -> list[tuple[AttributePlace, Tensor]]:
        """The attributes that were tensors when this object was made."""
        return [
            ((number, name), value)
            for number, then in enumerate(self._then)
            for name, value in then.items()
            if isinstance(value, Tensor)
        ]

    def then(self, place: AttributePlace) -> Any:
        """The value of an attribute when this object was made; MISSING without it."""
        number, name = place
        return self._then[number].get(name, MISSING)

    def now(self, place: AttributePlace) -> Any:
        """The present value of an attribute; MISSING without it."""
        number, name = place
        return self._held[number].get(name, MISSING)


class CopiedAttributes:
    """The attributes of copied modules, to be taken back to the originals.

    Args:
        originals: some layers.
        copies: copies of the layers, in which some modules may be the originals.
    """

    def __init__(self, originals: Sequence[nn.Module], copies: Sequence[nn.Module]) -> None:
        pairs = [
            (original, copy)
            for original, copy in zip(modules_in(originals), modules_in(copies), strict=True)
            if copy is not original
        ]
        self._originals = [original for original, _ in pairs]
        self._copies = [copy for _, copy in pairs]
        self._before = OwnAttributes(self._copies)

    def take_back(self) -> str | None:
        """Gives the originals all attributes that copies have got since the last call.

        Returns:
            The description of one that the original has got another value of by itself, if any.
        """
        lost = None
        changed = self._before.changed()
        for place in changed:
            number, name = place
            now, then = self._before.now(place), self._before.then(place)
            original = self._originals[number]
            held = vars(original)
            there = held.get(name, MISSING)
            if there is not then and not is_same(there, now):
                lost = f"attribute {name!r} of a {type(original).__name__}"
            if now is MISSING:
                held.pop(name, None)
            else:
                held[name] = now
        if changed:
            self._before = OwnAttributes(self._copies)
        return lost


def _refers(value: object) -> bool:
    """Whether the value is, or has, a parameter, a module or a weak reference."""
    kinds = (nn.Parameter, nn.Module, weakref.ref)
    return any(isinstance(part, kinds) for part in parts_of(value))


def is_same(one: Any, other: Any) -> bool:
    """Whether two values of an attribute are equal."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and are_equal(one, other.to(one.device))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return _are_equal(one, other)


def _are_equal(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:
        # Values of users, such as arrays, may not compare.
        return False
