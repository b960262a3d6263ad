"""The devices that plans are searched for: those at hand, or those of a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..boxes import Box, BoxDevice, slowest
from ..boxes.box import known

# The share of a GPU's memory that is left to its driver, to rings between stages and to gaps.
RESERVED = 0.1


@dataclass(frozen=True)
class Site:
    """Devices that plans are searched for.

    Attributes:
        names: the name of each device.
        memory: bytes that each device has; None for any number.
    """

    names: Sequence[str]
    memory: float | None


def at_hand(names: Sequence[str], memory: float | None = None) -> Site:
    """Devices of this machine. By default each has the memory of the smallest GPU."""
    gpus = [name for name in names if name != "cpu"]
    if memory is None and gpus:
        least = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus)
        memory = least * (1 - RESERVED)
    return Site(names, memory)


def on_box(box: Box, names: Sequence[str], memory: float | None = None) -> Site:
    """The devices of a box.

    Args:
        box: a profile with several devices, all alike.
        names: of the devices at hand, which are measured in their place.
        memory: as of `Site`; None for that of the box's smallest GPU.

    Raises:
        ValueError: the box has one device, its devices differ, those at hand are of another kind,
            or the box does not tell a link, the rate of the memory, or the memory of its GPUs.
    """
    box.require_alike()
    # Costs need both later; whatever lacks is told before anything is measured.
    _ = slowest(box), memory_rate(box)
    device, count = box.devices[0], len(box.devices)
    if count == 1:
        raise ValueError(
            f"box must have several devices, got one, {device.name}. Tune without a box"
        )
    for name in names:
        if not _is_like(name, device):
            raise ValueError(
                f"devices must be like those of the box, whose times they tell, got {name!r} for "
                f"{device.name}. Measure on such a device"
            )
    if not device.is_gpu:
        return Site(["cpu"] * count, memory)
    if memory is None:
        least = min(known(each.memory_bytes, "memory_bytes") for each in box.devices)
        memory = least * (1 - RESERVED)
    return Site([f"cuda:{number}" for number in range(count)], memory)


def memory_rate(box: Box) -> float:
    """The bytes that each device reads or writes in a nanosecond, at least."""
    return min(known(each.memory_bytes_per_ns, "memory_bytes_per_ns") for each in box.devices)


def _is_like(name: str, device: BoxDevice) -> bool:
    if name == "cpu" or not device.is_gpu:
        return name == "cpu" and not device.is_gpu
    here = torch.cuda.get_device_properties(name)
    capability, processors = (here.major, here.minor), here.multi_processor_count
    # The profile may lack either.
    return (device.capability or capability, device.num_processors or processors) == (
        capability,
        processors,
    )
