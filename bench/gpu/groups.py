"""Groups of multiprocessors: one resource split, a green context and streams for each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .tools import DEVICE, checked, driver

NON_BLOCKING = 1
DEFAULT_STREAM = 1  # the only flag of cuGreenCtxCreate, and compulsory


@dataclass
class Group:
    """`context` is held, since its streams need it."""

    context: Any
    num_multiprocessors: int

    def stream(self) -> torch.cuda.ExternalStream:
        handle = checked(driver().cuGreenCtxStreamCreate(self.context, NON_BLOCKING, 0))
        return torch.cuda.ExternalStream(int(handle), device=DEVICE)


def split(num_groups: int, multiprocessors_each: int) -> list[Group]:
    """Disjoint groups, since it is one split that makes them all."""
    torch.cuda.synchronize()  # which makes torch's context
    cu = driver()
    device = checked(cu.cuDeviceGet(DEVICE.index))
    kind = cu.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = checked(cu.cuDeviceGetDevResource(device, kind))
    parts, made, _ = checked(
        cu.cuDevSmResourceSplitByCount(num_groups, whole, 0, multiprocessors_each)
    )
    if made != num_groups:
        raise RuntimeError(f"{num_groups} groups of {multiprocessors_each} wanted, {made} made")
    groups = []
    for part in parts[:made]:
        description = checked(cu.cuDevResourceGenerateDesc([part], 1))
        context = checked(cu.cuGreenCtxCreate(description, device, DEFAULT_STREAM))
        groups.append(Group(context, int(part.sm.smCount)))
    return groups
