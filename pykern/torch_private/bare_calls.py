"""Calls of modules that spare torch's search for hooks, which takes a fifth of a small layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from . import profiler
from .bare_layers import BARE

has_any_global_hook: Callable[[], object] = _has_any_global_hook
_CALL, _CALL_IMPL = nn.Module.__call__, nn.Module._call_impl


def bare(function: Any) -> Callable[..., Any]:
    """The forward of a module whose call does nothing beside it; else the function as it is.

    A hook that is registered later is not called by the result. The Python tracer of torch.profiler
    names modules by their calls, so that they stay while a profile is recorded.
    """
    kind: Any = type(function)
    found: Callable[..., Any] = function
    if kind.__call__ is not _CALL or kind._call_impl is not _CALL_IMPL:
        return found
    does_more = (
        function._compiled_call_impl is not None
        or function._forward_pre_hooks
        or function._forward_hooks
        or function._backward_pre_hooks
        or function._backward_hooks
        or has_any_global_hook()
        or profiler.is_recording()
    )
    if does_more:
        return found
    found = function.forward
    if kind in BARE:
        forward, make = BARE[kind]
        if getattr(found, "__func__", None) is forward:
            return make(function)
    return found


class BareCalls(dict[str, Callable[..., Any]]):
    """Modules by name, as `bare` finds them; those that come later when they are first called."""

    def __init__(self, modules: Mapping[str, nn.Module | None]) -> None:
        super().__init__({name: bare(module) for name, module in modules.items()})
        self._modules = modules

    def __missing__(self, name: str) -> Callable[..., Any]:
        call = self[name] = bare(self._modules[name])
        return call


def bare_calls(layers: Iterable[nn.Module]) -> list[Callable[..., Any]]:
    """The calls of layers one after another, those in an `nn.Sequential` in its place."""
    calls: list[Callable[..., Any]] = []
    for layer in layers:
        call = bare(layer)
        if getattr(call, "__func__", None) is nn.Sequential.forward:
            # One without layers returns its argument.
            calls += bare_calls(layer) or [call]  # type: ignore[arg-type]
        else:
            calls.append(call)
    return calls
