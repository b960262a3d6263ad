"""Calls of modules and autograd functions, of which a recorder is told: those of its thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from .. import _C
from ..forks import fork_safe_lock


class Listener(Protocol):
    """An object that is told of calls in place of their being made."""

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Takes a module's call; `call` makes it."""

    def call_function(self, kind: Any, apply: Any, args: Any, kwargs: Any) -> Any:
        """Takes an autograd function's call; `apply` makes it."""


def _own() -> tuple[Any, Any]:
    return nn.Module.__call__, torch.autograd.Function.__dict__["apply"]


# By thread. The calls, which are the process's, are replaced while there is any.
_listeners: dict[int, Listener] = {}
_lock = fork_safe_lock()
# The functions before they were replaced, and whether they are replaced.
_before = _own()
_replaced = False


def _called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    listener = _listeners.get(threading.get_ident())
    call = _before[0]
    if listener is None:
        return call(module, *args, **kwargs)
    return listener.call_module(module, call, args, kwargs)


def _applied(kind: Any, *args: Any, **kwargs: Any) -> Any:
    listener = _listeners.get(threading.get_ident())
    apply = _before[1]
    if listener is None:
        return apply.__get__(None, kind)(*args, **kwargs)
    return listener.call_function(kind, apply, args, kwargs)


def told(listener: Listener | None) -> AbstractContextManager[object]:
    """A context, within which calls of this thread go to the listener; to none where it is None."""
    before = _listeners.get(threading.get_ident())
    return _C.Within(partial(told_to, listener), lambda _: told_to(before))


def told_to(listener: Listener | None) -> None:
    """From now on, calls of this thread go to the listener; to none where it is None.

    May be interrupted anywhere, and is then called again.
    """
    global _before, _replaced  # noqa: PLW0603 - as global as what they stand for
    with _lock:
        if not _replaced:
            _before = _own()
        _replaced = True
        if listener is None:
            _listeners.pop(threading.get_ident(), None)
        else:
            _listeners[threading.get_ident()] = listener
        call, apply = (_called, classmethod(_applied)) if _listeners else _before
        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.Function.apply = apply  # type: ignore[method-assign,assignment]
        _replaced = bool(_listeners)
