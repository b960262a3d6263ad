"""Caches and NUMA nodes as Linux lists them in files; absent files give nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")
DEVICES = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class Cache:
    """One cache of the processor.

    Attributes:
        level: 1 is nearest to the core.
        kind: Data, Instruction or Unified.
        size: As Linux writes it, such as 32K.
        cpus: The CPUs that share it, such as 0-3,8.
    """

    level: int
    kind: str
    size: str
    cpus: str


@dataclass(frozen=True)
class Node:
    """One NUMA node.

    Attributes:
        number: Linux's number of the node.
        cpus: Its CPUs, such as 0-3,8.
    """

    number: int
    cpus: str


def caches(cpus: Iterable[int], system: Path = SYSTEM) -> tuple[Cache, ...]:
    """Every cache of these CPUs once, by level, kind, size and first CPU."""
    found = set()
    for cpu in cpus:
        for entry in (system / f"cpu/cpu{cpu}/cache").glob("index*"):
            level, kind, size, shared = (
                _text(entry / name) for name in ("level", "type", "size", "shared_cpu_list")
            )
            if level and kind and size and shared:
                found.add(Cache(int(level), kind, size, shared))
    return tuple(sorted(found, key=lambda one: (one.level, one.kind, one.size, cpus_in(one.cpus))))


def cpus_in(text: str) -> list[int]:
    """The numbers in a list of Linux, such as 0-3,8."""
    ranges = (part.split("-") for part in text.split(","))
    return [cpu for ends in ranges for cpu in range(int(ends[0]), int(ends[-1]) + 1)]


def nodes(system: Path = SYSTEM) -> tuple[Node, ...]:
    """Every NUMA node, by number."""
    found = [
        Node(int(entry.name.removeprefix("node")), _text(entry / "cpulist"))
        for entry in (system / "node").glob("node[0-9]*")
    ]
    return tuple(sorted(found, key=lambda node: node.number))


def node_of_device(address: str, devices: Path = DEVICES) -> int | None:
    """The NUMA node that a device is attached to; None if Linux does not tell.

    Args:
        address: its place on the PCI bus, such as 0000:3b:00.0.
        devices: the folder of all.
    """
    found = _text(devices / address / "numa_node")
    # Linux writes -1 on a machine with a single node.
    return int(found) if found.isdecimal() else None


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
