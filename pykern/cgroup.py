"""The limits that a container or a batch system sets for this process (control groups)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, inf
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """The tightest limits of all groups that this process is in; infinite without a limit.

    Attributes:
        cores: time on cores per time.
        free_bytes: memory that is left.
        free_threads: threads that may still be started.
    """

    cores: float = inf
    free_bytes: float = inf
    free_threads: float = inf


def limits(root: Path = Path("/")) -> Limits:
    """The limits of versions 1 and 2 of control groups; none where their files cannot be read.

    Args:
        root: the folder in which the paths of the system begin.
    """
    cores, free_bytes, free_threads = [inf], [inf], [inf]
    for folder in _folders(root):
        quota, period, *_ = [*_words(folder / "cpu.max"), "max", "1"]
        cores.append(_number(quota) / _number(period))
        cores.append(_first(folder / "cpu.cfs_quota_us") / _first(folder / "cpu.cfs_period_us", 1))
        for limit, used, left in (
            ("memory.max", "memory.current", free_bytes),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", free_bytes),
            ("pids.max", "pids.current", free_threads),
        ):
            left.append(_first(folder / limit) - _first(folder / used, 0))
    return Limits(min(cores), min(free_bytes), min(free_threads))


def usable_cores(limit: float | None = None) -> int:
    """The number of cores that this process may keep busy, at least 1.

    Args:
        limit: time on cores per time; None for the limit of this process's groups.
    """
    most = limits().cores if limit is None else limit
    return max(1, min(len(os.sched_getaffinity(0)), floor(min(most, 2**20))))


def _folders(root: Path) -> Iterator[Path]:
    """The folders of the groups that this process is in, and of all groups around these."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        top = mount / controllers.removeprefix("name=")
        folder = top / path.lstrip("/")
        yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _first(file: Path, otherwise: float = inf) -> float:
    words = _words(file)
    return _number(words[0]) if words else otherwise


def _number(word: str) -> float:
    """The number; infinite for "max", and for the -1 and the huge numbers of version 1."""
    number = inf if word == "max" else float(word)
    return number if 0 <= number < 2**60 else inf
