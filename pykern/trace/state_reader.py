"""State that a forward's Python reads beside its inputs: attributes, and what its code names."""

from __future__ import annotations

import argparse
import inspect
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .reach import is_foreign
from .state import Hashed, described, state_of
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
        opened: those of its modules whose forwards are recorded.
    """

    def __init__(self, model: nn.Module, opened: Iterable[nn.Module]) -> None:
        self._model = model
        self._opened = list(opened)
        self._names: set[str] = set()
        # Where values are, and by which name.
        self._places: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self._cells: dict[int, types.CellType] = {}
        for module in self._opened:
            functions = _functions_of(module)
            names = {name for each in functions for name in _names_in(each.__code__)}
            self._names |= names
            self._cells |= {id(cell): cell for of in functions for cell in of.__closure__ or ()}
            kinds = [vars(kind) for kind in type(module).__mro__ if not is_foreign(kind)]
            for held in (vars(module), *kinds, *(each.__globals__ for each in functions)):
                self._places |= {
                    (id(held), name): (held, name)
                    for name in sorted(names & held.keys())
                    if isinstance(held[name], PLAIN) or _is_state(held[name])
                }
        self._last = self._now()

    def now(self) -> Hashed:
        """The present state; the same object as long as it does not change."""
        state = self._now()
        if state != self._last:
            self._last = state
        return self._last

    def _now(self) -> Hashed:
        found: list[Hashable] = []
        seen: set[int] = set()
        for held, name in self._places.values():
            self._note(held.get(name), found, seen, _DEPTH)
        for cell in self._cells.values():
            self._note(_content(cell), found, seen, _DEPTH)
        return Hashed((state_of(self._model, self._opened), tuple(found)))

    def _note(self, value: Any, found: list[Hashable], seen: set[int], depth: int) -> None:
        """Appends the numbers, texts and the like in a value, where the code may read them."""
        if isinstance(value, PLAIN):
            found.append(described(value))
        elif depth and id(value) not in seen and _is_state(value):
            seen.add(id(value))
            for part in self._parts(value):
                self._note(part, found, seen, depth - 1)

    def _parts(self, value: Any) -> Iterable[Any]:
        if isinstance(value, dict | list | tuple):
            if len(value) > _MOST:
                return ()
            return list(value.values()) if isinstance(value, dict) else value
        held: Mapping[str, Any] = getattr(value, "__dict__", {})
        return [part for name, part in held.items() if name in self._names]


def _is_state(value: Any) -> bool:
    """Whether a forward may read numbers in it."""
    if isinstance(value, dict | list | tuple | types.SimpleNamespace | argparse.Namespace):
        return True
    if isinstance(value, Tensor | nn.Module | type | types.ModuleType) or callable(value):
        return False
    return not is_foreign(type(value))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # Nothing has been put into it yet.
        return None


def _functions_of(module: nn.Module) -> list[types.FunctionType]:
    """The forward of a module, and the functions of its class and file that this leads to."""
    methods = {
        name: value for kind in reversed(type(module).__mro__) for name, value in vars(kind).items()
    }
    found: dict[types.FunctionType, None] = {}
    todo: list[Any] = [methods.get("forward")]
    while todo:
        function = todo.pop()
        function = function.fget if isinstance(function, property) else function
        function = inspect.unwrap(function) if callable(function) else None
        if not isinstance(function, types.FunctionType) or is_foreign(function):
            continue
        if function not in found:
            found[function] = None
            is_near = function.__module__ == type(module).__module__
            places = [vars(module), methods, *([function.__globals__] if is_near else [])]
            for name in _names_in(function.__code__):
                todo += [place[name] for place in places if name in place]
    return list(found)


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names and texts in a function's code, and in functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names_in(constant)
