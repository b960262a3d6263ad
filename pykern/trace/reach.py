"""The Python objects that modules can reach outside their arguments, and their contents."""

from __future__ import annotations

import contextvars
import re
import threading
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from .code_names import attribute_names, codes_in, content_of, is_foreign
from .sources import source_of
from .state import TORCHS, described
from .values import PLAIN

# How many objects lie between a module and what is looked for.
_DEPTH = 8
# Larger dicts and lists, such as vocabularies, are tables, not state.
_MOST = 1000


@dataclass(frozen=True, slots=True)
class Place:
    """An object that holds others, and which Python may write.

    Attributes:
        name: how the module calls it.
        holder: the object, kept alive so that no other takes its identity.
        read: what it holds now, by name, key or position.
    """

    name: str
    holder: object
    read: Callable[[], Mapping[Any, Any]]

    @property
    def is_by_thread(self) -> bool:
        """Whether each thread has something of its own there."""
        return isinstance(self.holder, (threading.local, contextvars.ContextVar))

    def values(self) -> dict[Any, Hashable]:
        """The numbers, texts and the like in it."""
        now = dict(self.read())
        return {key: described(each) for key, each in now.items() if isinstance(each, PLAIN)}


def places_of(modules: Iterable[nn.Module], functions: Iterable[object] = ()) -> dict[int, Place]:
    """The places that the forwards of modules, and some functions, can reach, by identity.

    These are the attributes of the modules, globals and closures that their forwards name, and what
    is in these: dicts, lists, objects, thread-locals and context variables.
    """
    found: dict[int, Place] = {}
    for module in modules:
        if not is_foreign(type(module)):
            _visit(module, type(module).__name__, found, _DEPTH)
            _visit(type(module).forward, type(module).__name__, found, _DEPTH)
    for function in functions:
        _visit(function, getattr(function, "__name__", "loss_fn"), found, _DEPTH)
    return found


def _visit(thing: object, name: str, found: dict[int, Place], depth: int) -> None:
    if depth == 0 or id(thing) in found or isinstance(thing, (*PLAIN, Tensor)):
        return
    if isinstance(thing, partial):
        _visit([thing.func, *thing.args, *thing.keywords.values()], name, found, depth)
    elif isinstance(thing, types.MethodType):
        _visit(thing.__func__, name, found, depth)
        _visit(thing.__self__, name, found, depth)
    elif isinstance(thing, types.FunctionType):
        _visit_function(thing, found, depth)
    else:
        read = _reader(thing)
        if read is not None:
            found[id(thing)] = Place(name, thing, read)
            for key, value in list(read().items()):
                _visit(value, _joined(name, thing, key), found, depth - 1)


def _visit_function(function: types.FunctionType, found: dict[int, Place], depth: int) -> None:
    if is_foreign(function):
        return
    code, names = function.__code__, function.__globals__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if id(cell) not in found:
            found[id(cell)] = Place(name, cell, partial(_single, content_of, cell))
            _visit(content_of(cell), name, found, depth - 1)
    # By the function: which of a file's names are looked at differs.
    for name in {name for part in codes_in(code) for name in part.co_names} & names.keys():
        value = names[name]
        if isinstance(value, (*PLAIN, Tensor)) or source_of(name, value) is not None:
            key = hash((id(names), name))
            found[key] = Place(name, names, partial(_single, names.get, name))
        else:
            _visit(value, name, found, depth - 1)


def _reader(thing: Any) -> Callable[[], Mapping[Any, Any]] | None:
    """A function that returns the contents of a thing; None if the thing is foreign."""
    if isinstance(thing, dict | list | tuple):
        kind = next(kind for kind in (dict, list, tuple) if isinstance(thing, kind))
        # Some make what is asked of them.
        is_plain = type(thing).__getitem__ is kind.__getitem__
        return partial(_entries, thing) if is_plain and len(thing) <= _MOST else None
    if isinstance(thing, contextvars.ContextVar):
        return partial(_single, thing.get, None)
    if isinstance(thing, type | types.ModuleType) or not hasattr(thing, "__dict__"):
        return None
    if isinstance(thing, nn.Module):
        # A copy first: other stages may write meanwhile.
        return lambda: {key: each for key, each in {**vars(thing)}.items() if key not in TORCHS}
    is_space = isinstance(thing, types.SimpleNamespace | threading.local)
    return None if is_foreign(type(thing)) and not is_space else lambda: vars(thing)


def _single(get: Callable[..., Any], *of: Any) -> dict[str, Any]:
    return {"": get(*of)}


def _entries(thing: Any) -> Mapping[Any, Any]:
    return thing if isinstance(thing, dict) else dict(enumerate(thing))


def named(place: Place, key: object) -> str:
    """The name of the value at a key of a place, for a message."""
    return _joined(place.name, place.holder, key)


def word_of(place: Place, key: object) -> str:
    """The word by which code reads what stands at a key of a place."""
    if isinstance(key, str) and key:
        return key
    return re.split(r"[.\[]", place.name)[-1 if place.name[-1:] != "]" else -2]


def words_of(modules: Iterable[nn.Module]) -> set[str]:
    """The names and texts in the code of the modules' own functions."""
    kinds = {kind for module in modules for kind in type(module).__mro__ if not is_foreign(kind)}
    codes = [
        value.__code__
        for kind in kinds
        for value in vars(kind).values()
        if isinstance(value, types.FunctionType)
    ]
    return {name for code in codes for name in (*attribute_names(code), *code.co_freevars)}


def _joined(name: str, thing: object, key: object) -> str:
    if key == "":
        return name
    if isinstance(thing, dict | list | tuple) and not isinstance(thing, types.ModuleType):
        return f"{name}[{key!r}]"
    return f"{name}.{key}"


def shared(of_owners: Iterable[Mapping[int, Place]]) -> Iterator[tuple[Place, list[int]]]:
    """The places that several owners can reach, with the numbers of these."""
    owners: dict[int, list[int]] = {}
    places: dict[int, Place] = {}
    for number, found in enumerate(of_owners):
        for key, place in found.items():
            owners.setdefault(key, []).append(number)
            places.setdefault(key, place)
    return ((places[key], who) for key, who in owners.items() if len(who) > 1)
