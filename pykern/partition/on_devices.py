"""Calls of a model itself, while its stages are on GPUs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..tensors.trees import map_tree


@contextmanager
def on_its_devices(model: nn.Module) -> Iterator[None]:
    """Within it, a model on several devices can be called, as by `generate` of transformers.

    Each module whose parameters and buffers share a device gets its arguments there. One device
    works at a time: a pipeline that is called is faster, where it can do the same.

    Args:
        model: the model that a pipeline was made of, or any other; its forward, outside of these
            modules, must not mix tensors of several devices.
    """
    with ExitStack() as hooks:
        for module, device in _placed(model):
            hooks.callback(
                module.register_forward_pre_hook(_Bring(device), with_kwargs=True).remove
            )
        yield


class _Bring:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def bring(leaf: Any) -> Any:
            return leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf

        return map_tree(bring, args), map_tree(bring, kwargs)


def _placed(module: nn.Module) -> Iterator[tuple[nn.Module, torch.device]]:
    """The outermost modules that are called and lie on one device, each with the device."""
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    is_called = type(module).forward is not nn.Module.forward
    if len(devices) == 1 and is_called and not isinstance(module, nn.ModuleList | nn.ModuleDict):
        yield module, devices.pop()
        return
    for child in module.children():
        yield from _placed(child)
