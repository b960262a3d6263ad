"""Names of devices as text, without a look at the machine: they need no torch."""

from __future__ import annotations

import re
from math import inf

WORKERS = re.compile(r"cpu(?::([0-9]{1,4}))?")
GPU = re.compile(r"cuda:([0-9]{1,4})(?:/([0-9]{1,4}))?")
MAX_WORKERS = 256
MAX_PARTS = 64
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([MG]i?B)")
_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


def num_workers(name: str) -> int | None:
    """The number of CPU workers; None if the name is not one of workers.

    Raises:
        ValueError: the number is out of range.
    """
    found = WORKERS.fullmatch(name)
    if found is None:
        return None
    return _in_range(name, "workers", int(found[1] or 1), MAX_WORKERS)


def gpu_and_parts(name: str) -> tuple[int, int] | None:
    """The index of a GPU and the number of its parts; None if the name is not one of a GPU.

    Raises:
        ValueError: the number of parts is out of range.
    """
    found = GPU.fullmatch(name)
    if found is None:
        return None
    return int(found[1]), _in_range(name, "parts", int(found[2] or 1), MAX_PARTS)


def require_known(name: str) -> None:
    """Refuses a name that cannot stand for devices on any machine.

    Raises:
        ValueError: the name is unknown, or a number in it is out of range.
    """
    if name != "cuda" and num_workers(name) is None and gpu_and_parts(name) is None:
        raise unknown(name)


def num_bytes_of(memory: object) -> float:
    """The bytes of a memory: a number of them, or such as "24GiB".

    Raises:
        TypeError, ValueError: it is neither, or not above 0.
    """
    if isinstance(memory, str) and (found := _MEMORY.fullmatch(memory)) is not None:
        memory = float(found[1]) * _UNITS[found[2]]
    if isinstance(memory, bool) or not isinstance(memory, int | float):
        raise TypeError(
            f"memory must be a number of bytes, or such as '24GiB' or '24GB', got {memory!r}. Omit "
            "it for any number"
        )
    if not 0 < memory < inf:
        raise ValueError(
            f"memory must be a number of bytes above 0, got {memory:g}. Omit it for any number"
        )
    return memory


def unknown(name: str) -> ValueError:
    """The error for a name that is unknown."""
    return ValueError(
        f"device {name!r} is unknown: use 'cpu:N' for N CPU workers, 'cuda' for every GPU, "
        "'cuda:0' for one, 'cuda:0/4' for four parts of one, or a list of 'cpu' or of 'cuda:0'"
    )


def _in_range(name: str, what: str, count: int, largest: int) -> int:
    if not 1 <= count <= largest:
        raise ValueError(f"devices must have 1 to {largest} {what}, got {name!r}")
    return count
