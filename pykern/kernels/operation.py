"""Registers operations with torch: a twin in plain torch for the CPU, Triton for CUDA.

Triton is imported when a CUDA tensor first needs it, so machines without a GPU do not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("pykern", "DEF")


def define(schema: str, twin: Callable[..., Any], like: Callable[..., Any] | None = None) -> Any:
    """Defines `torch.ops.pykern.<name>` and returns it.

    An operation computes without autograd: forward and backward are two operations, and an
    `autograd.Function` around them saves tensors. The forward also returns tensors that only the
    backward needs.

    Args:
        schema: as of `torch.library.define`, beginning with the operation's name.
        twin: computes the operation in plain torch, on any device; also for meta tensors. The
            function of the same name in the module of the same name of `pykern.kernels.gpu`
            launches the Triton kernels.
        like: the results without values, for fake tensors; None for those of the twin, which are
            slow where that calls many operations.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, twin, "CPU")
    _library.impl(name, _Launcher(twin), "CUDA")
    torch.library.register_fake(f"pykern::{name}", like or twin, lib=_library)
    return getattr(torch.ops.pykern, name).default


def wide(x: Tensor) -> Tensor:
    """The tensor in the type of sums: float64 for float64, float32 for all others."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def multiplied_type(x: Tensor) -> torch.dtype:
    """The type of a matrix product's operands, which autocast may set, as for nn.Linear."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _Launcher:
    """Imports a launcher at its first call. Calls with float64 tensors go to the twin.

    Triton launches on the current GPU, wherever tensors are, so the tensors' GPU is made current.
    """

    def __init__(self, twin: Callable[..., Any]) -> None:
        self._twin = twin
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype is torch.float64:
            return self._twin(*args, **kwargs)
        if self._function is None:
            self._function = self._find()
        with torch.cuda.device(args[0].device):
            return self._function(*args, **kwargs)

    def _find(self) -> Callable[..., Any]:
        module = self._twin.__module__.replace(".kernels.", ".kernels.gpu.")
        launcher: Callable[..., Any] = getattr(import_module(module), self._twin.__name__)
        return launcher
