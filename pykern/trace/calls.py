"""Calls of modules and autograd functions, of which a recorder is told: those of its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch

from .. import _C
from ..forks import fork_safe_lock


class Listener(Protocol):
    """An object that is told of calls in place of their being made.

    Attributes:
        kinds: the classes whose `__call__` it is told of.
    """

    kinds: set[type]

    def call_module(self, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Takes a module's call; `call` makes it."""

    def call_function(self, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Takes an autograd function's call; `apply` makes it."""


def kinds_of(modules: Iterable[object]) -> set[type]:
    """The classes that say what calls of some modules do: torch's, and those with code around."""
    kinds = {base for kind in set(map(type, modules)) for base in kind.__mro__}
    return {kind for kind in kinds if "__call__" in vars(kind)}


# A class, and the name of a function there.
_Place = tuple[type, str]

_APPLY: _Place = torch.autograd.Function, "apply"
# By thread. The calls, which are the process's, are replaced while there is any.
_listeners: dict[int, Listener] = {}
_lock = fork_safe_lock()
# The contents of a place before they were replaced.
_before: dict[_Place, Any] = {}


def _in_place_of(place: _Place, before: Any) -> Any:
    """A function that tells the thread's listener, or does what was done before."""

    def called(module: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _listeners.get(threading.get_ident())
        if listener is None:
            return before(module, *args, **kwargs)
        return listener.call_module(module, before, args, kwargs)

    def applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
        listener = _listeners.get(threading.get_ident())
        if listener is None:
            return before.__get__(None, kind)(*args, **kwargs)
        return listener.call_function(kind, before, args, kwargs)

    return classmethod(applied) if place == _APPLY else called


def told(listener: Listener | None) -> AbstractContextManager[object]:
    """A context, within which calls of this thread go to the listener; to none where it is None."""
    before = _listeners.get(threading.get_ident())
    return _C.Within(partial(told_to, listener), lambda _: told_to(before))


def told_to(listener: Listener | None) -> None:
    """From now on, calls of this thread go to the listener; to none where it is None.

    May be interrupted anywhere, and is then called again.
    """
    with _lock:
        if listener is None:
            _listeners.pop(threading.get_ident(), None)
        else:
            _listeners[threading.get_ident()] = listener
        wanted = {(kind, "__call__") for one in _listeners.values() for kind in one.kinds}
        if _listeners:
            wanted.add(_APPLY)
        for place in wanted:
            kind, name = place
            before = _before.setdefault(place, vars(kind)[name])
            setattr(kind, name, _in_place_of(place, before))
        for place in _before.keys() - wanted:
            setattr(*place, _before[place])
            del _before[place]
