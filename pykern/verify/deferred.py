"""Running statistics that move once in a step, for the plain model: `features.batch_norm`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.features.batch_norm import BatchNorm
from .compare import Bounds

# The pipeline joins the statistics of microbatches in the buffers' precision; here they are sums in
# float64 over all rows.
BOUNDS = Bounds(rtol=1e-4, atol=1e-5)


class WholeBatch:
    """Moves running statistics towards the statistics of all rows between `begin` and `move`.

    The caller of `begin` restores the modules.

    Args:
        modules: of the model; those that are not a batch normalisation stay as they are.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        updating = [
            module
            for module in modules
            if isinstance(module, BatchNorm)
            and module.running_mean is not None
            and module.training
            and module.track_running_stats
            and torch.is_grad_enabled()
        ]
        self._sums: dict[BatchNorm, list[Tensor]] = {module: [] for module in updating}

    def begin(self) -> None:
        """Turns off the modules' own updates, and begins to sum their inputs."""
        for module, sums in self._sums.items():
            module.register_forward_pre_hook(partial(_add, sums))
            module.track_running_stats = False

    def move(self) -> None:
        """Moves the statistics."""
        for module, sums in self._sums.items():
            if sums:
                _move(module, sums)


def _add(sums: list[Tensor], _: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Adds the inputs of a call by channel: the number of values, their sum, the sum of squares."""
    values = arguments[0].detach().double().movedim(1, 0).flatten(1)
    count = torch.full_like(values[:, 0], values.shape[1])
    term = torch.stack([count, values.sum(1), values.square().sum(1)])
    sums[:] = [term + sums[0] if sums else term]


def _move(module: BatchNorm, sums: list[Tensor]) -> None:
    count, total, squares = sums[0]
    mean = total / count
    variance = (squares - count * mean.square()) / (count - 1)
    factor = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        factor = 1 / float(module.num_batches_tracked) if factor is None else factor
    for buffer, value in ((module.running_mean, mean), (module.running_var, variance)):
        assert buffer is not None
        buffer.copy_((1 - (factor or 0.0)) * buffer.double() + (factor or 0.0) * value)
