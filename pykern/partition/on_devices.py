"""Calls of a model itself, while its stages are on GPUs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..runtime.microbatch import to_device
from ..trace import is_list


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
            hook = module.register_forward_pre_hook(partial(_bring, device), with_kwargs=True)
            hooks.callback(hook.remove)
        yield


def _bring(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return to_device(args, device), to_device(kwargs, device)


def _placed(module: nn.Module) -> Iterator[tuple[nn.Module, torch.device]]:
    """The outermost modules that are called and lie on one device, each with the device."""
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    if len(devices) == 1 and not is_list(module):
        yield module, devices.pop()
        return
    for child in module.children():
        yield from _placed(child)
