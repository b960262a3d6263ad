"""State that a forward's Python reads beside its inputs: attributes, and what its code names."""

from __future__ import annotations

import argparse
import types
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from torch import Tensor, nn

from .code_names import attribute_names, content_of, functions_of, global_names, is_foreign
from .state import TORCHS, Hashed, Same, described, state_of
from .values import PLAIN

# So many attributes and keys lie between a module, or a global, and the numbers that are looked at.
_DEPTH = 6
# Larger dicts and lists, such as vocabularies, are tables, not state.
_MOST = 100


class StateReader:
    """Reads the state that the forwards of some modules may read.

    All attributes of the modules are looked at, two levels deep. The code of forwards, and of the
    methods and the functions of the same file that it names, tells what else: deeper attributes,
    those of classes, globals, and the variables of functions around.

    Args:
        model: the whole.
        opened: those of its modules whose forwards are recorded, from the first call of `now` on.
    """

    def __init__(self, model: nn.Module, opened: Collection[nn.Module]) -> None:
        self._model = model
        self._opened = opened
        self._names: set[str] = set()
        # By owner and name: where values are.
        self._places: dict[tuple[int, str], Mapping[str, Any]] = {}
        # By identity and name: the variables of functions around.
        self._cells: dict[tuple[int, str], types.CellType] = {}
        # By class, the names of attributes that are not in its objects' dictionaries.
        self._slots: dict[type, list[str]] = {}
        self._last: Hashed | None = None

    def now(self) -> Hashed:
        """The present state; the same object as long as it does not change."""
        if self._last is None:
            self._look()
        values = self._values()
        state = Hashed((state_of(self._model, self._opened), tuple(values.items())))
        if state != self._last:
            self._last = state
        return self._last

    def changed(self, before: Hashed, now: Hashed) -> list[str]:
        """The names of what differs between two states."""
        (held, values), (held_now, values_now) = before.value, now.value
        modules = self._model.named_modules()
        paths = {id(module): f"{path}." if path else "" for path, module in modules}
        names = {paths.get(owner, "") + name for (owner, name), _ in set(values) ^ set(values_now)}
        (_, parts), (_, parts_now) = held.value, held_now.value
        for module, (own, _), (own_now, _) in zip(self._opened, parts, parts_now, strict=True):
            names |= {paths.get(id(module), "") + name for name, _ in set(own) ^ set(own_now)}
        return sorted(names)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context around a run of the model; values that it changes do not count from then on."""
        before = self._values()
        try:
            yield
        finally:
            for key, value in self._values().items():
                if value != before[key]:
                    self._places.pop(key, None)
                    self._cells.pop(key, None)

    def _look(self) -> None:
        """Finds where the forwards may read."""
        for module in self._opened:
            functions = functions_of(module)
            names = set[str]().union(*(attribute_names(each.__code__) for each in functions))
            self._names |= names
            # Others are looked at elsewhere.
            self._add(module, names - TORCHS)
            self._add(type(module), names)
            for each in functions:
                cells = zip(each.__code__.co_freevars, each.__closure__ or (), strict=True)
                self._cells |= {(id(cell), name): cell for name, cell in cells}
                place = each.__globals__
                for name in sorted(global_names(each.__code__) & place.keys()):
                    if isinstance(place[name], type | types.ModuleType):
                        self._add(place[name], names)
                    elif not callable(place[name]):
                        self._places[id(place), name] = place

    def _add(self, owner: Any, names: set[str]) -> None:
        """Adds attributes of a module, or of a class or a file of the user's."""
        spaces = owner.__mro__ if isinstance(owner, type) else [owner]
        for space in spaces:
            if is_foreign(space):
                continue
            held = vars(space)
            for name in sorted(names & held.keys()):
                if not callable(held[name]) and not isinstance(held[name], property):
                    self._places[id(space), name] = held

    def _values(self) -> dict[tuple[int, str], Hashable]:
        """By place, the numbers and the like there, and in what is there."""
        found: dict[tuple[int, str], Hashable] = {}
        # Each for itself: a change in one place must not look like one in another.
        for key, held in self._places.items():
            found[key] = self._described(held.get(key[1]), {}, _DEPTH)
        for key, cell in self._cells.items():
            found[key] = self._described(content_of(cell), {}, _DEPTH)
        return found

    def _described(self, value: Any, seen: dict[int, int], depth: int) -> Hashable:
        if isinstance(value, PLAIN):
            return described(value)
        if isinstance(value, Tensor | nn.Module):
            # Their values are not Python's, and a description would keep them alive.
            return (type(value),)
        if id(value) in seen:
            return "seen", seen[id(value)]
        seen[id(value)] = len(seen)
        is_container = isinstance(value, dict | list | tuple)
        if is_container and len(value) > _MOST:
            return Same(value), len(value)
        if depth == 0 or not (is_container or _is_space(value)):
            return described(value, 1)
        parts = value if is_container else self._attributes(value)
        pairs = list(parts.items() if isinstance(parts, dict) else enumerate(parts))
        inside = tuple(
            (key if isinstance(key, PLAIN) else Same(key), self._described(part, seen, depth - 1))
            for key, part in pairs
        )
        return type(value) if is_container else Same(value), inside

    def _attributes(self, value: Any) -> dict[str, Any]:
        """Those that the code names."""
        slots = self._slots.get(type(value))
        if slots is None:
            slots = self._slots[type(value)] = [
                name
                for kind in type(value).__mro__
                for name in sorted(self._names & vars(kind).keys())
                if isinstance(vars(kind)[name], types.MemberDescriptorType)
            ]
        found = {name: getattr(value, name, None) for name in slots}
        # An object may make what is asked of it, and raise anything.
        with suppress(Exception):
            held = dict(value.__dict__)
            found |= {name: held[name] for name in held if name in self._names}
        return found


def _is_space(value: Any) -> bool:
    """Whether it is an object of the user's with attributes."""
    if isinstance(value, types.SimpleNamespace | argparse.Namespace):
        return True
    return not (isinstance(value, type) or callable(value) or is_foreign(type(value)))
