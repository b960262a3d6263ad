"""All that is read and measured of a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..cgroup import usable_cores
from ..tuning.overheads import handover_ns
from .copies import SIZES, copy_bytes_per_ns, flops_per_ns
from .gpus import MeasuredGpu, gpus, uuids
from .links import MeasuredLink, links
from .nvml import Managed, managed
from .system import Cache, Node, caches, nodes


@dataclass(frozen=True)
class Topology:
    """A machine.

    Attributes:
        cores: The number of cores that this process may keep busy.
        caches: The caches of the CPUs that it may use, by level; empty where Linux lists none.
        nodes: The NUMA nodes; empty where Linux lists none.
        copy_bytes_per_ns: By size in bytes, the bandwidth of copies in memory on one thread.
        handover_ns: The time from an action to one of the next stage that waits for it, in a
            pipeline of two CPU workers.
        gpus: Each GPU that torch sees.
        links: Each ordered pair of GPUs.
        flops_per_ns: Operations of float32 matrix products per nanosecond on one thread; None if
            they were not measured.
        managed: The facts of NVIDIA's management library about the GPUs.
    """

    cores: int
    caches: tuple[Cache, ...]
    nodes: tuple[Node, ...]
    copy_bytes_per_ns: Mapping[int, float]
    handover_ns: float
    gpus: tuple[MeasuredGpu, ...] = ()
    links: tuple[MeasuredLink, ...] = ()
    flops_per_ns: float | None = None
    managed: Managed = field(default_factory=Managed)


def measure() -> Topology:
    """Reads and measures this machine: seconds, and about one more for each pair of GPUs."""
    has_gpus = torch.cuda.is_available()
    return Topology(
        usable_cores(),
        caches(os.sched_getaffinity(0)),
        nodes(),
        {size: copy_bytes_per_ns(size) for size in SIZES},
        handover_ns(),
        gpus() if has_gpus else (),
        links() if has_gpus else (),
        flops_per_ns(),
        managed(uuids()) if has_gpus else Managed(),
    )
