"""One file for a model that is sharded over several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..tensors.dtensor import is_dtensor
from .errors import CheckpointError


def write_once(model: nn.Module, write: Callable[[], None]) -> None:
    """Makes the first of the model's processes write; all processes return after that.

    Raises:
        CheckpointError: the first process could not write.
        BaseException: this is the first process, and `write` raised it.
    """
    parameters: Iterator[Any] = model.parameters()
    mesh = next((one.device_mesh for one in parameters if is_dtensor(one)), None)
    if mesh is None:
        write()
        return
    failed: BaseException | None = None
    if mesh.get_local_rank() == 0:
        try:
            write()
        except BaseException as error:
            failed = error
    told = torch.tensor(failed is not None, device=mesh.device_type)
    dist.broadcast(told, group=mesh.get_group(), group_src=0)
    if failed is not None:
        raise failed
    if told:
        raise CheckpointError(
            "the first of the processes with shards of the model could not write. Its own message "
            "says why"
        )
