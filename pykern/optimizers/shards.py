"""The parts of DTensors that a process steps, and torch's optimizer that shares out state."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

from ..tensors.dtensor import is_dtensor, local


def stepped_part(parameter: nn.Parameter) -> nn.Parameter:
    """The tensor that is stepped for a parameter: for a DTensor, this process's part."""
    if not is_dtensor(parameter):
        return parameter
    return nn.Parameter(local(parameter.detach()), requires_grad=parameter.requires_grad)


def parts_of_whole(parameter: Tensor, entries: dict[str, Any]) -> dict[str, Any]:
    """The state of a parameter; if the parameter is a DTensor, as parts of DTensors."""
    if not is_dtensor(parameter):
        return entries
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - takes long

    like: Any = parameter

    def sharded(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != local(parameter).shape:
            return value
        there = value.to(parameter.device)
        return DTensor.from_local(
            there, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )

    return {key: sharded(value) for key, value in entries.items()}


def part_of(value: Any) -> Any:
    """This process's part of a value of a state."""
    return local(value) if isinstance(value, Tensor) else value


def zero_redundancy_optimizer() -> Any:
    """Torch's optimizer, whose package takes most of a second to import."""
    with warnings.catch_warnings():
        # The package compiles other optimizers, not used here, in a way that torch has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - see above
    return ZeroRedundancyOptimizer
