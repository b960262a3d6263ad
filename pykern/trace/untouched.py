"""A run of a model that leaves no trace in it."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CutError, Unsettled
from .state import attributes


@contextmanager
def untouched(
    model: nn.Module, opened: Collection[nn.Module], *, settling: bool = False
) -> Iterator[None]:
    """Puts back, in the end, buffers, attributes of modules, and torch's random numbers.

    Args:
        model: the whole.
        opened: those of its modules that may not leave tensors in attributes: what they do is
            repeated, and this would not be.
        settling: whether these keep what they have changed in their attributes, beside tensors.

    Raises:
        CutError: one left a tensor.
        Unsettled: one changed something else.
    """
    modules = list(model.modules())
    described = {module: attributes(module, 1) for module in opened}
    kept = [_attributes(module) for module in modules]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    left: list[str] = []
    changed: list[str] = []
    with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
        try:
            yield
        finally:
            for module, before in zip(modules, kept, strict=True):
                if module in opened:
                    changed += _changed(module, described[module])
                    left += [f"{type(module).__name__}.{name}" for name in _left(module, before)]
                if module not in opened or not settling:
                    _restore(module, before)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
    if left:
        raise CutError(
            f"the forward leaves a tensor in {_listed(left)}, which would not be repeated for "
            "each microbatch: return it, or do that within a module that stays whole"
        )
    if changed and not settling:
        raise Unsettled(
            f"the forward changes {_listed(changed)}, which would not be repeated for each "
            "microbatch: do that within a module that stays whole, or outside of the model; if it "
            "does so in its first call only, call the model once before"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, dict | list) else value
        for name, value in vars(module).items()
    }


def _left(module: nn.Module, before: dict[str, Any]) -> list[str]:
    now = {**vars(module), **module._buffers}
    then = {**before, **before["_buffers"]}
    return [
        name
        for name, value in now.items()
        if isinstance(value, Tensor) and value is not then.get(name)
    ]


def _changed(module: nn.Module, before: dict[str, Hashable]) -> list[str]:
    """Attributes that are not what they were; those that are new were made for this run."""
    now = attributes(module, 1)
    return [
        f"{type(module).__name__}.{name}"
        for name, value in before.items()
        if name in now and now[name] != value
    ]


def _restore(module: nn.Module, before: dict[str, Any]) -> None:
    now = vars(module)
    for name in now.keys() - before.keys():
        del now[name]
    for name, value in before.items():
        held = now.get(name)
        if isinstance(value, dict) and isinstance(held, dict):
            # The dictionary itself may be known elsewhere.
            held.clear()
            held.update(value)
        elif isinstance(value, list) and isinstance(held, list):
            held[:] = value
        else:
            now[name] = value
