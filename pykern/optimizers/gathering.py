"""Optimizer states of several processes, brought to the first as JSON and bytes of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..checkpoint import CheckpointError
from ..checkpoint.file import DTYPES, require_storable
from ..checkpoint.tree import decode, encode
from ..parallel.peers.errors import understanding
from ..parallel.peers.texts import text_of
from ..plan.files.strict_json import read_json
from ..plan.files.typed_json import from_text, to_text

_DTYPES = {str(dtype): dtype for dtype in DTYPES}


@dataclass(frozen=True)
class _Told:
    """The message of a process before it sends tensors.

    Attributes:
        form: its state as JSON.
        tensors: dtype and shape of each.
        failure: why the state cannot be sent; empty if it can.
    """

    form: str = "null"
    tensors: Sequence[tuple[str, list[int]]] = ()
    failure: str = ""


def states_of_all(state: dict[str, Any], group: ProcessGroup) -> tuple[list[dict[str, Any]], str]:
    """The optimizer states of all processes, in the first; in the others only their own.

    Args:
        state: of this process, as from `Optimizer.state_dict`.
        group: of gloo; all of its processes call this.

    Returns:
        States by rank, with tensors on the CPU; and, in the first process, what is in the state of
        one that a checkpoint cannot hold, else nothing.

    Raises:
        PeerError: a process sends something else.
        RuntimeError: a process is gone, or has not come in time.
    """
    tensors: list[Tensor] = []
    mine = _packed(state, tensors)
    told = [text_of(mine, group, rank) for rank in range(group.size())]
    if group.rank() > 0:
        for tensor in tensors:
            dist.send(_bytes_of(tensor), group=group, group_dst=0)
        return [state], ""
    found = [_unpacked(text, rank, group, tensors) for rank, text in enumerate(told)]
    failures = [failure for _, failure in found if failure]
    return [value for value, _ in found], failures[0] if failures else ""


def _packed(state: dict[str, Any], tensors: list[Tensor]) -> str:
    def add(name: str, tensor: Tensor) -> str:
        require_storable(name, tensor)
        tensors.append(tensor.detach().cpu().contiguous())
        return str(len(tensors) - 1)

    groups = [{"params": group["params"]} for group in state["param_groups"]]
    try:
        form = encode({"state": state["state"], "param_groups": groups}, "optimizer", add)
    except CheckpointError as error:
        tensors.clear()
        return to_text(_Told(failure=str(error)))
    about = [(str(tensor.dtype), list(tensor.shape)) for tensor in tensors]
    return to_text(_Told(to_text(form), about))


def _unpacked(
    text: str, rank: int, group: ProcessGroup, own: list[Tensor]
) -> tuple[dict[str, Any], str]:
    """The state of a process, and its failure if it has one."""
    with understanding(f"process {rank}"):
        told = from_text(_Told, text)
        there = own if rank == 0 else list(_received(told.tensors, rank, group))
        named = {str(number): tensor for number, tensor in enumerate(there)}
        return decode(read_json(told.form), named.__getitem__), told.failure


def _received(
    about: Sequence[tuple[str, list[int]]], rank: int, group: ProcessGroup
) -> Iterator[Tensor]:
    for dtype, shape in about:
        if dtype not in _DTYPES or min(shape, default=0) < 0:
            raise ValueError(
                f"tensors must have a known dtype and a shape, got {dtype} and {shape}"
            )
        tensor = torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")
        dist.recv(_bytes_of(tensor), group=group, group_src=rank)
        yield tensor


def _bytes_of(tensor: Tensor) -> Tensor:
    """The same memory."""
    return tensor.reshape(-1).view(torch.uint8)
