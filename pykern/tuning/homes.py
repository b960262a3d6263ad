"""Models that pipelines on GPUs move, back where they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .. import _C
from ..runtime.recompute.buffers import modules_in


@contextmanager
def moved_back(models: Sequence[object]) -> Iterator[None]:
    """A context after which parameters are on the devices of before, and buffers are the same.

    Args:
        models: modules, among other objects that are passed over, such as a plain loss function.
    """
    modules = modules_in(models)
    homes = {
        p: p.device for module in modules for p in module._parameters.values() if p is not None
    }
    buffers = [(module, dict(module._buffers)) for module in modules]
    with _C.Undo(_move_back, homes, buffers):
        yield


def _move_back(
    homes: dict[nn.Parameter, torch.device],
    buffers: Sequence[tuple[nn.Module, dict[str, Tensor | None]]],
) -> None:
    for parameter, home in homes.items():
        if parameter.device != home:
            # The gradients of measured steps are on the GPU, too.
            parameter.grad = None
            parameter.data = parameter.data.to(home)
    for module, before in buffers:
        module._buffers.update(before)
