"""Operations that may draw random numbers are intercepted, each thread's by its own interceptor."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import fallthrough_kernel

# A key of torch's dispatcher that is above all others, and that torch itself does not use. A thread
# that includes the key calls the kernels registered for it; for most operations that is a
# fallthrough to their usual kernels.
_KEY = "TESTING_ONLY_GenericMode"
key: Any = torch._C._parse_dispatch_key(_KEY)
include = torch._C._dispatch_tls_set_dispatch_key_included
# Not objects of class Library, whose kernels an exit handler removes. A later handler may run a
# step, and so may a child that is forked meanwhile.
_libraries: dict[str, Any] = {}
_watched: set[str] = set()
# The name of the interceptor among the objects that torch carries to the threads of a backward.
_NAME = "pykern"


class _OfThread(threading.local):
    """The interceptor in force on this thread."""

    inner: Interceptor | None = None


here = _OfThread()


# The functions that torch.jit has compiled in this process.
_scripts: Any = torch.jit._state._python_cu
# Has torch carry an interceptor to the threads of this thread's backwards and of scripts that fork.
# Empty without a GPU and such scripts: all else runs on the thread that calls it. torch copies what
# it carries for each node of each backward, which takes as long as a small operation, and never
# drops a name.
_carry: list[Callable[[Interceptor | None], None]] = []


def _carrying() -> Callable[[Interceptor | None], None]:
    """A function that carries to the threads that run the backwards of GPUs."""
    stash = torch._C._stash_obj_in_tls
    probe = object()
    before = sys.getrefcount(probe)
    stash(_NAME, probe)
    if sys.getrefcount(probe) > before:
        return partial(stash, _NAME)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))

    def stash_owned(value: Interceptor | None) -> None:
        """Takes the reference that torch 2.11 does not take, and releases."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
        stash(_NAME, value)

    return stash_owned


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
        self._outer = here.inner
        here.inner = self
        for carry in _carry:
            carry(self)
        include(key, True)
        return self

    def __exit__(self, *_: object) -> None:
        include(key, self._outer is not None)
        here.inner = self._outer
        for carry in _carry:
            carry(self._outer)


def interceptor() -> Interceptor | None:
    """The interceptor that is in force on this thread."""
    return here.inner


def set_interceptor(instead: Interceptor | None) -> None:
    """Sets the interceptor in force on this thread; None for no interceptor."""
    if instead is None:
        # The key is excluded first, because an included key may be called.
        include(key, False)
    here.inner = instead
    for carry in _carry:
        carry(instead)
    if instead is not None:
        include(key, True)


def watch_draws() -> None:
    """Registers the operations that may draw, from all libraries loaded by now."""
    if not _carry and (torch.cuda.is_initialized() or _scripts.get_functions()):
        _carry.append(_carrying())
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


def _come_along(func: Operation) -> Interceptor:
    """The interceptor that torch has carried to this thread, with the key."""
    if torch._C._is_key_in_tls(_NAME):
        inner: Interceptor = torch._C._get_obj_in_tls(_NAME)
        return inner
    raise RuntimeError(
        f"{func} must draw on the thread that runs the stage, got another one of torch's. Compile "
        "a script that forks in this process, or nest fewer checkpoints with use_reentrant=True"
    )


def _intercepted(func: Operation) -> Callable[..., Any]:
    """The kernel that has an operation drawn as the interceptor in force does it."""
    num_before = func.num_before_generator
    method = func.method

    def kernel(*args: Any, **kwargs: Any) -> Any:
        mine = here.inner
        # A thread of autograd has what was carried there.
        inner = _come_along(func) if mine is None else mine
        own, outer = inner.generator, inner._outer
        # As `takes_generator`, which is a call.
        if (
            own is not None
            and outer is None
            and not kwargs
            and 0 < len(args) <= num_before
            and type(args[0]) is Tensor
            and args[0].is_cpu
        ):
            include(key, False)
            try:
                return method(*args, generator=own)
            finally:
                include(key, True)
        include(key, outer is not None)
        here.inner = outer
        try:
            if own is None or not takes_generator(func, args, kwargs):
                return inner.draw(func, args, kwargs)
            # An outer interceptor sees that the generator is given.
            kwargs["generator"] = own
            return method(*args, **kwargs)
        finally:
            here.inner = mine
            # A draw that this one led to may have carried another.
            for carry in _carry:
                carry(inner)
            include(key, True)

    return kernel
