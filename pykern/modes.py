"""torch's state of a thread, restored after a block even if the block was interrupted.

A `with torch.no_grad()` may leave gradients off: Python handles signals also within the Python of
its `__exit__`. Here an interrupt is raised when everything is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from . import _C
from .torch_private import (
    Interceptor,
    compiler,
    dispatch_modes,
    function_modes,
    interceptor,
    multithreading,
    pop_dispatch_mode,
    pop_function_mode,
    push_dispatch_mode,
    push_function_mode,
    set_compiler,
    set_grad,
    set_interceptor,
    set_multithreading,
)

AUTOCAST_DEVICES = ("cpu", "cuda")
# The settings of autocast by device: whether it is on, and to which type it casts.
Autocast = Sequence[tuple[str, bool, torch.dtype]]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def as_before() -> _C.Undo:
    """A context that restores the modes of this thread at its end."""
    return _C.Undo(
        _put_back,
        (torch.is_grad_enabled(), multithreading()),
        autocast(),
        function_modes(),
        dispatch_modes(),
        interceptor(),
        compiler(),
    )


def uncompiled() -> _C.Undo:
    """The same, and within it no compiler of the caller is in force on this thread.

    A compiler would compile pykern's code, and layers only where they run on this thread.
    """
    undo = as_before()
    set_compiler(None)
    return undo


def no_grad(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """A decorator like `torch.no_grad()`, after which gradients are on even after an interrupt."""

    @wraps(function)
    def without_gradients(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        with as_before():
            set_grad(False)
            return function(*args, **kwargs)

    return without_gradients


def _put_back(
    of_autograd: tuple[bool, bool],
    of_autocast: Autocast,
    of_functions: Sequence[Any],
    of_dispatch: Sequence[Any],
    of_draws: Interceptor | None,
    of_code: Any,
) -> None:
    set_compiler(of_code)
    set_interceptor(of_draws)
    grad, threads = of_autograd
    set_grad(grad)
    set_multithreading(threads)
    set_autocast(of_autocast)
    set_function_modes(of_functions)
    now = dispatch_modes()
    if now != of_dispatch:
        for _ in now:
            pop_dispatch_mode()
        for mode in of_dispatch:
            push_dispatch_mode(mode)


def autocast() -> Autocast:
    """Autocast's settings on this thread."""
    return [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in AUTOCAST_DEVICES
    ]


def set_autocast(settings: Autocast) -> None:
    """Gives this thread these settings of autocast."""
    for device, enabled, dtype in settings:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def set_function_modes(modes: Sequence[Any]) -> None:
    """Gives this thread these function modes, the innermost last, without entering them."""
    now = function_modes()
    if now == modes:
        return
    for _ in now:
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def same_numbers() -> _C.Undo:
    """A context that restores the CPU's default generator at its end."""
    return _C.Undo(torch.default_generator.set_state, torch.default_generator.get_state())


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """A context in which torch has so many intra-op threads. More that spin take workers' cores."""
    with _C.Undo(torch.set_num_threads, torch.get_num_threads()):
        torch.set_num_threads(count)
        yield


def threads_of_a_worker(num_workers: int, running: int = 1) -> AbstractContextManager[None]:
    """A context in which torch has as many intra-op threads as each of `num_workers` gets.

    Where `running` of them share these threads, it has as many times more.
    """
    return torch_threads(max(1, torch.get_num_threads() // num_workers) * running)


def random_states(devices: Iterable[torch.device]) -> dict[torch.Generator, Tensor]:
    """The states of default generators: the CPU's, and those of GPUs among the devices."""
    gpus = [device.index or 0 for device in devices if device.type == "cuda"]
    if gpus:
        torch.cuda.init()  # before, torch has no generators of GPUs
    generators = [torch.default_generator, *(torch.cuda.default_generators[gpu] for gpu in gpus)]
    return {generator: generator.get_state() for generator in generators}


def set_states(states: Mapping[torch.Generator, Tensor]) -> None:
    """Sets generators to these states."""
    for generator, state in states.items():
        generator.set_state(state)


@contextmanager
def both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    """A context of two, the first around the second."""
    with one, other:
        yield
