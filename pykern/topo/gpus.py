"""GPUs as torch lists them, with the rates of their memory and products, and of their host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from . import timed
from .system import node_of_device


@dataclass(frozen=True)
class MeasuredGpu:
    """One GPU.

    Attributes:
        name: As the driver calls it.
        memory_bytes: All of its memory.
        num_processors: Its streaming multiprocessors.
        capability: Its compute capability, such as (9, 0).
        from_host: By size in bytes, bytes per nanosecond of copies from pinned memory of the host.
        to_host: The same of copies to pinned memory.
        from_pageable: The same of copies of 256 MiB from memory that is not pinned.
        copy_slows: The time of matrix products beside copies from the host, by their time alone.
        memory_bytes_per_ns: Bytes that a copy within its memory reads and writes per nanosecond.
        flops_per_ns: Operations per nanosecond of products of large matrices in bfloat16; in
            float16 below compute capability 8, which has no units for bfloat16.
        numa_node: The NUMA node of the host that it is attached to; None if Linux does not tell.
    """

    name: str
    memory_bytes: int
    num_processors: int
    capability: tuple[int, int]
    from_host: Mapping[int, float]
    to_host: Mapping[int, float]
    from_pageable: float
    copy_slows: float
    memory_bytes_per_ns: float
    flops_per_ns: float
    numa_node: int | None = None


def gpus() -> tuple[MeasuredGpu, ...]:
    """Every GPU that torch sees, measured with its host. Needs 512 MiB on each GPU."""
    return tuple(_gpu(number) for number in range(torch.cuda.device_count()))


def uuids() -> list[str]:
    """By GPU, its name for NVIDIA's tools."""
    count = torch.cuda.device_count()
    return [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(count)]


def _gpu(number: int) -> MeasuredGpu:
    facts = torch.cuda.get_device_properties(number)
    largest = timed.LINK_SIZES[-1]
    here = timed.room(number, largest)
    pinned = torch.empty(largest, dtype=torch.uint8, device="cpu", pin_memory=True)
    pageable = torch.empty(largest, dtype=torch.uint8)
    half = largest // 2
    return MeasuredGpu(
        facts.name,
        facts.total_memory,
        facts.multi_processor_count,
        (facts.major, facts.minor),
        {size: timed.rate(number, here, pinned, size) for size in timed.LINK_SIZES},
        {size: timed.rate(number, pinned, here, size) for size in timed.LINK_SIZES},
        timed.rate(number, here, pageable, largest),
        timed.slows(number, timed.copies(here, pinned, timed.copies_of(largest))),
        # Each byte is read and written.
        2 * timed.rate(number, here[half:], here[:half], half),
        _flops_per_ns(number, torch.bfloat16 if facts.major >= 8 else torch.float16),
        _numa_node(facts),
    )


def _flops_per_ns(gpu: int, dtype: torch.dtype) -> float:
    """Operations per nanosecond of matrix products, behind others of their kind."""
    products = timed.products(gpu, dtype)
    return timed.PRODUCTS * 2 * timed.WIDTH**3 / timed.behind(gpu, products, products)


def _numa_node(facts: Any) -> int | None:
    """The node of a GPU, whose place on the PCI bus torch tells."""
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    domain, bus, device = (getattr(facts, name, None) for name in names)
    if domain is None or bus is None or device is None:
        return None
    return node_of_device(f"{domain:04x}:{bus:02x}:{device:02x}.0")
