"""Operations that may draw random numbers are intercepted, each thread's by its own interceptor."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import fallthrough_kernel

# A key of torch's dispatcher that is above all others, and that torch itself does not use. A thread
# that includes the key calls the kernels registered for it; for most operations that is a
# fallthrough to their usual kernels.
_KEY = "TESTING_ONLY_GenericMode"
_key: Any = torch._C._parse_dispatch_key(_KEY)
# The name of the interceptor among the objects that torch carries to the threads of a backward.
_NAME = "pykern.interceptor"
_include = torch._C._dispatch_tls_set_dispatch_key_included
_stashed = torch._C._get_obj_in_tls
_is_stashed = torch._C._is_key_in_tls
# Not objects of class Library, whose kernels an exit handler removes. A later handler may run a
# step, and so may a child that is forked meanwhile.
_libraries: dict[str, Any] = {}
_watched: set[str] = set()


def _stash_owned(name: str, value: object) -> None:
    """Stashes an object with a reference, which torch 2.11 releases later but does not take."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(name, value)


def _stashing() -> Callable[[str, object], None]:
    probe = object()
    before = sys.getrefcount(probe)
    torch._C._stash_obj_in_tls(_NAME + ".probe", probe)
    if sys.getrefcount(probe) > before:
        return torch._C._stash_obj_in_tls
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return _stash_owned


_stash = _stashing()


class Operation:
    """An operation that may draw random numbers.

    Attributes:
        method: of tensors, that calls the operation in less time; the operation without one.
        num_before_generator: the most positional arguments with which a generator can be given by
            name; -1 without such an argument.
    """

    def __init__(self, func: OpOverload) -> None:
        self._func = func
        namespace, _, name = func._schema.name.partition("::")
        in_place = namespace == "aten" and name.endswith("_")
        self.method: Callable[..., Any] = getattr(Tensor, name, func) if in_place else func
        self.num_before_generator = -1
        for position, argument in enumerate(func._schema.arguments):
            if argument.name == "generator":
                last = len(func._schema.arguments) if argument.kwarg_only else position
                self.num_before_generator = last

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the operation."""
        return self._func(*args, **kwargs)

    def __str__(self) -> str:
        return str(self._func)


def takes_generator(func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operation draws on the CPU, and accepts a generator for it.

    Tensor subclasses, such as sharded tensors, use a generator differently.
    """
    return (
        len(args) > 0
        and type(args[0]) is Tensor
        and args[0].is_cpu
        and kwargs.get("generator") is None
        and len(args) <= func.num_before_generator
    )


class Interceptor:
    """A context in which `draw` is called for this thread's operations that may draw numbers.

    These are the operations with torch's tag for random draws, as found by `watch_draws`. Unlike a
    `DispatchMode`, an interceptor costs other operations nothing. During `draw` the interceptor
    around this one is in force, if any.

    Attributes:
        generator: given to calls that take one, which are not asked `draw` then; see
            `takes_generator`. None to ask for all calls.
    """

    generator: torch.Generator | None = None
    _outer: Interceptor | None = None

    def draw(self, func: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the operation in some way, and returns the operation's result."""
        raise AssertionError(f"{self} does not draw: {func}, {args}, {kwargs}")

    def __enter__(self) -> Self:
        # Written out, here and below: every action would pay for the calls of `interceptor` and
        # `set_interceptor`.
        self._outer = _stashed(_NAME) if _is_stashed(_NAME) else None
        _stash(_NAME, self)
        _include(_key, True)
        return self

    def __exit__(self, *_: object) -> None:
        _include(_key, self._outer is not None)
        _stash(_NAME, self._outer)


def interceptor() -> Interceptor | None:
    """The interceptor that is in force on this thread."""
    # Not whether the key is included: torch 2.11 cannot compile a caller that asks for this.
    return _stashed(_NAME) if _is_stashed(_NAME) else None


def set_interceptor(instead: Interceptor | None) -> None:
    """Sets the interceptor in force on this thread; None for no interceptor."""
    if instead is None:
        # The key is excluded before the stash is emptied, because an included key may be called.
        _include(_key, False)
        _stash(_NAME, None)
    else:
        _stash(_NAME, instead)
        _include(_key, True)


def watch_draws() -> None:
    """Registers the operations that may draw, from all libraries loaded by now."""
    _look_up(len(sys.modules), len(torch.ops.loaded_libraries))


@lru_cache(maxsize=1)
def _look_up(*_counts: int) -> None:
    # An interrupt may come between any two calls, and this is then called again: what is registered
    # is asked of torch, and a library is kept when it has what it is there for.
    if "_" not in _libraries:
        others = _new_library("_")
        others.fallback(_KEY, fallthrough_kernel, False)
        _libraries["_"] = others
    for name in set(torch._C._dispatch_get_all_op_names()) - _watched:
        operation, _, overload = name.partition(".")
        # Operations for TorchScript alone have no entry.
        found = torch._C._get_operation_overload(operation, overload)
        # A composite operation calls other operations, and each of them is intercepted itself.
        if (
            found is not None
            and torch.Tag.nondeterministic_seeded in found[2]
            and not torch._C._dispatch_has_kernel_for_dispatch_key(
                name, "CompositeImplicitAutograd"
            )
            and not torch._C._dispatch_has_kernel_for_dispatch_key(name, _KEY)
        ):
            namespace, short = operation.split("::")
            func = getattr(getattr(getattr(torch.ops, namespace), short), overload or "default")
            _library(namespace).impl(name, _KEY, _intercepted(Operation(func)), False)
        _watched.add(name)


def _library(namespace: str) -> Any:
    if namespace not in _libraries:
        _libraries[namespace] = _new_library(namespace)
    return _libraries[namespace]


def _new_library(namespace: str) -> Any:
    return torch._C._dispatch_library("IMPL", namespace, "", __file__, 0)


def _intercepted(func: Operation) -> Callable[..., Any]:
    """The kernel that has an operation drawn as the interceptor in force does it."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        inner = _stashed(_NAME)
        outer = inner._outer
        _include(_key, outer is not None)
        _stash(_NAME, outer)
        try:
            own = inner.generator
            if own is None or not takes_generator(func, args, kwargs):
                return inner.draw(func, args, kwargs)
            kwargs["generator"] = own
            return func.method(*args, **kwargs)
        finally:
            _stash(_NAME, inner)
            _include(_key, True)

    return kernel
