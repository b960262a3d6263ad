"""Attributes that are computed when they are first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_T = TypeVar("_T")


class once(Generic[_T]):
    """As `functools.cached_property`, which in Python 3.11 holds a lock while it computes.

    A lock that is held while another thread forks stays locked in the child for ever.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, _: type) -> once[_T]: ...
    @overload
    def __get__(self, instance: object, _: type) -> _T: ...
    def __get__(self, instance: object | None, _: type) -> once[_T] | _T:
        if instance is None:
            return self
        # Found before this descriptor from now on, also where the class lets nothing be set.
        value = instance.__dict__[self._name] = self._compute(instance)
        return value
