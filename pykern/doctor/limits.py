"""Limits of threads and memory, settings that slow a pipeline, and a compiler."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator, Mapping
from math import inf
from pathlib import Path

from ..cgroup import Limits
from .diagnosis import Fact

# A pipeline starts a thread for each worker, and torch some for each core.
FEWEST_THREADS = 64
# torch alone takes half of it.
LEAST_BYTES = 2**30
_GIB = 2**30

_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "has each kernel wait for the one before"),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("1", "has copies wait for kernels"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1", "has each tensor ask the driver for memory"),
}


def of_threads(limits: Limits, soft_limit: float) -> Fact:
    """How many threads may still be started."""
    free = min(limits.free_threads, soft_limit)
    if free >= FEWEST_THREADS:
        return Fact("thread limit", "none" if free == inf else f"{free:.0f}")
    problem = (
        f"Workers and torch may need {FEWEST_THREADS} threads: raise ulimit -u, or pids.max of "
        "the container."
    )
    return Fact("thread limit", f"{free:.0f}", problem, stops=True)


def of_memory(limits: Limits, available: float, address_space: float) -> Fact:
    """How much memory is left."""
    free = min(limits.free_bytes, available, address_space)
    value = "unknown" if free == inf else f"{free / _GIB:.1f} GiB"
    if free >= LEAST_BYTES:
        return Fact("free memory", value)
    problem = (
        f"torch and a pipeline need {LEAST_BYTES // _GIB} GiB: end other processes, or raise the "
        "container's memory or ulimit -v."
    )
    return Fact("free memory", value, problem, stops=True)


def soft_limit(which: int) -> float:
    """The soft limit of a resource of this process."""
    limit = resource.getrlimit(which)[0]
    return inf if limit == resource.RLIM_INFINITY else limit


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> float:
    """The memory that the system can give without swapping; infinite if it does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:
        return inf
    return inf if found is None else 1024 * float(found[1])


def of_settings(environment: Mapping[str, str]) -> Iterator[Fact]:
    """A fact for each variable of the environment that slows a pipeline on GPUs."""
    for name, (value, effect) in _SLOW.items():
        if environment.get(name) == value:
            problem = f"{name}={value} {effect}: unset it, unless you debug."
            yield Fact("environment", f"{name}={value}", problem)


def of_compiler(environment: Mapping[str, str]) -> Fact:
    """The C++ compiler that torch.compile and Triton call."""
    asked = environment.get("CXX", "")
    names = [asked.split()[0]] if asked.split() else ["c++", "g++", "clang++"]
    found = next(filter(None, map(shutil.which, names)), None)
    if found is not None:
        return Fact("compiler", found)
    problem = (
        f"torch.compile and Triton need a C++ compiler, and {asked or 'g++'} is not there: "
        "apt install g++, or set CXX."
    )
    return Fact("compiler", "not found", problem)


def limits_of_process(limits: Limits) -> Iterator[Fact]:
    """Facts about this process."""
    # The limit of a user does not bind root.
    of_user = soft_limit(resource.RLIMIT_NPROC) if os.geteuid() else inf
    yield of_threads(limits, of_user)
    yield of_memory(limits, available_bytes(), soft_limit(resource.RLIMIT_AS))
    yield of_compiler(os.environ)
    yield from of_settings(os.environ)
