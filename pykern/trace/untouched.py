"""A run of a model that leaves no trace in it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .errors import CutError


@contextmanager
def untouched(model: nn.Module, opened: Collection[nn.Module]) -> Iterator[None]:
    """Puts back, in the end, buffers, attributes of modules, and torch's random numbers.

    Args:
        model: the whole.
        opened: those of its modules that may not leave tensors in attributes: what they do is
            repeated, and this would not be.

    Raises:
        CutError: one did.
    """
    modules = list(model.modules())
    attributes = [_attributes(module) for module in modules]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    left: list[str] = []
    with torch.random.fork_rng(devices=sorted(d for d in devices if d is not None)):
        try:
            yield
        finally:
            for module, before in zip(modules, attributes, strict=True):
                if module in opened:
                    left += [f"{type(module).__name__}.{name}" for name in _left(module, before)]
                _restore(module, before)
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
    if left:
        raise CutError(
            f"the forward leaves a tensor in {', '.join(left)}, which would not be repeated for "
            "each microbatch: return it, or do that within a module that stays whole"
        )


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value.copy() if isinstance(value, dict) else value
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
        else:
            now[name] = value
