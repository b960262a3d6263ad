"""torch's DTensors, told from other tensors without importing their seldom used module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor."""
    # The type's name is enough: importing the module of DTensors takes half a second.
    return type(tensor).__name__ == "DTensor"


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, detached; the whole tensor if it is not a DTensor."""
    part: Any = tensor.detach()
    return part.to_local() if is_dtensor(part) else part  # type: ignore[no-any-return]


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, detached, gathered by a collective of the processes that have the parts."""
    full: Any = tensor.detach()
    return full.full_tensor() if is_dtensor(full) else full  # type: ignore[no-any-return]


def shard_like(one: Tensor, full: Tensor) -> Tensor:
    """`full`, or if `one` is a DTensor, a DTensor like `one` with this process's part of `full`.

    Nothing is sent.
    """
    if not is_dtensor(one):
        return full
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - see above

    like: Any = one
    there = full.to(like.to_local().device)
    return distribute_tensor(there, like.device_mesh, like.placements, src_data_rank=None)


@torch.no_grad()
def settle_gradient(parameter: Tensor) -> None:
    """Gives a DTensor's gradient the parameter's own layout, which sums partial gradients once.

    torch leaves the gradient of a backward as it is: as partial sums, or whole in each process.
    """
    gradient: Any = parameter.grad
    if is_dtensor(gradient):
        mine: Any = parameter
        if gradient.placements != mine.placements:
            parameter.grad = gradient.redistribute(placements=mine.placements)
