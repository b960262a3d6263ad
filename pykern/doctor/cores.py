"""Cores, and torch's threads that compete with workers for them."""

from __future__ import annotations

import os
from collections.abc import Iterator

from ..cgroup import Limits, usable_cores
from ..columns import counted
from .diagnosis import Fact


def cores(limits: Limits, torch_threads: int) -> Iterator[Fact]:
    """Facts about cores, and about torch's intra-op threads."""
    allowed, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    usable = usable_cores(limits.cores)
    limit = "no limit" if limits.cores > 2**20 else f"limit {limits.cores:g} by the control group"
    value = f"{usable} usable: {there} there, {allowed} allowed by affinity, {limit}"
    problem = ""
    if usable < 2:
        problem = (
            "CPU workers share one core, so their stages never overlap: allow more cores "
            "(taskset, --cpus of the container)."
        )
    elif usable < allowed:
        problem = f"The control group stops threads beyond {usable}: use devices='cpu:{usable}'."
    yield Fact("cores", value, problem)
    yield of_torch_threads(torch_threads, usable)


def of_torch_threads(torch_threads: int, usable: int) -> Fact:
    """Whether torch's threads leave the workers their cores."""
    value = f"{torch_threads}, shared out among the workers of a step"
    if torch_threads <= usable:
        return Fact("torch threads", value)
    problem = (
        f"torch's {torch_threads} threads compete with the workers for {counted(usable, 'core')}: "
        f"call torch.set_num_threads({usable}) or fewer, or set OMP_NUM_THREADS."
    )
    return Fact("torch threads", value, problem)
