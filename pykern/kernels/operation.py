"""How an operation is made known to torch: a twin in plain torch for the CPU, Triton for CUDA.

Triton is imported when a CUDA tensor first needs it, so that machines without a GPU do without it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("pykern", "DEF")


def define(schema: str, twin: Callable[..., Any], launcher: str) -> Any:
    """Defines `torch.ops.pykern.<name>` and returns it.

    An operation computes without autograd: forward and backward are two of them, and an
    `autograd.Function` around them keeps what is needed. What only the backward needs is a result.

    Args:
        schema: as of `torch.library.define`, beginning with the operation's name.
        twin: computes it in plain torch, on tensors of any device, and tells their shapes.
        launcher: "module:function" in `pykern.kernels.gpu`; launches the Triton kernels.
    """
    name = schema.split("(", 1)[0]
    _library.define(schema)
    _library.impl(name, twin, "CPU")
    _library.impl(name, _Launcher(launcher, twin), "CUDA")
    torch.library.register_fake(f"pykern::{name}", twin, lib=_library)
    return getattr(torch.ops.pykern, name).default


def wide(x: Tensor) -> Tensor:
    """The tensor in the type that sums are computed in: float32, or float64 where it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def multiplied_type(x: Tensor) -> torch.dtype:
    """The type of the operands of a matrix product: what autocast wants, as nn.Linear asks it."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _Launcher:
    """Imports a launcher when it is first called. What is float64 goes to the twin.

    Triton launches on the current GPU, wherever tensors are, so theirs is made the current one.
    """

    def __init__(self, where: str, twin: Callable[..., Any]) -> None:
        self._where = where
        self._twin = twin
        self._function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype is torch.float64:
            return self._twin(*args, **kwargs)
        if self._function is None:
            module, name = self._where.split(":")
            self._function = getattr(import_module(f"pykern.kernels.gpu.{module}"), name)
        with torch.cuda.device(args[0].device):
            return self._function(*args, **kwargs)
