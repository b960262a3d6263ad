"""torch's DTensors, told from other tensors without importing what is seldom there."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor."""
    # Their module takes half a second to import, for nothing where there is none.
    return type(tensor).__name__ == "DTensor"


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, detached; of one that is no DTensor, all of it."""
    part: Any = tensor.detach()
    return part.to_local() if is_dtensor(part) else part  # type: ignore[no-any-return]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, detached: a collective of the processes that have the parts."""
    full: Any = tensor.detach()
    return full.full_tensor() if is_dtensor(full) else full  # type: ignore[no-any-return]


def shard_like(one: Tensor, full: Tensor) -> Tensor:
    """A tensor of one's shape as a DTensor if that is one, with this process's part of it.

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
    """Gives a DTensor's gradient the parameter's own layout: its sums are made, once.

    torch leaves what a backward has found as it is: as parts of a sum, or whole for each process.
    """
    gradient: Any = parameter.grad
    if is_dtensor(gradient):
        mine: Any = parameter
        if gradient.placements != mine.placements:
            parameter.grad = gradient.redistribute(placements=mine.placements)
