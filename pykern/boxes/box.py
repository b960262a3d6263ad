"""A box of devices, for predictions of what would run on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from typing import TypeVar

VERSION = 3
MEASURED, PUBLISHED = "measured", "published, not measured"

T = TypeVar("T")


@dataclass(frozen=True)
class RateBySize:
    """The bandwidth of messages of one size.

    Attributes:
        num_bytes: The size.
        bytes_per_ns: The bandwidth while nothing else is on its way.
        both_ways: The bandwidth of each direction while both are under way; None if unknown.
    """

    num_bytes: int
    bytes_per_ns: float
    both_ways: float | None = None


@dataclass(frozen=True)
class BoxDevice:
    """A GPU, or a core of a CPU. None where a value is not known.

    Attributes:
        name: As its maker calls it.
        memory_bytes: The size of its memory.
        memory_bytes_per_ns: How fast it reads and writes that; the same number in GB/s.
        flops_per_ns: Dense operations in bfloat16, at most; in float32 for a core of a CPU.
        capability: The compute capability of a GPU, such as (9, 0).
        num_processors: The number of its streaming multiprocessors.
        numa_node: The NUMA node of the host that it is attached to.
        from_host: By size, copies from pinned memory of the host; empty if they are not known.
        to_host: The same of copies to pinned memory.
    """

    name: str
    memory_bytes: float | None
    memory_bytes_per_ns: float | None
    flops_per_ns: float | None
    capability: tuple[int, int] | None
    num_processors: int | None
    numa_node: int | None = None
    from_host: tuple[RateBySize, ...] = ()
    to_host: tuple[RateBySize, ...] = ()

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU. A core of a CPU has none of these values."""
        return any((self.memory_bytes, self.capability, self.num_processors))

    @property
    def kind(self) -> tuple[object, ...]:
        """The same for devices of one make."""
        return self.name, self.capability, self.num_processors


@dataclass(frozen=True)
class BoxLink:
    """The way between any two devices of a group, one way.

    Attributes:
        groups: Numbers of devices.
        bytes_per_ns: The bandwidth of a long message; the same number in GB/s.
        latency_ns: The time of a message beyond that of its bytes.
        by_size: The bandwidth of shorter and longer messages; empty if it is not known.
        copy_slows: The time of a device's matrix products beside messages over the link, by their
            time alone; None if it is not known.
    """

    groups: tuple[tuple[int, ...], ...]
    bytes_per_ns: float
    latency_ns: float
    by_size: tuple[RateBySize, ...] = ()
    copy_slows: float | None = None


@dataclass(frozen=True)
class BoxHost:
    """The host of a box. None where a value is not known.

    Attributes:
        cores: The number of its cores.
        bytes_per_ns: The bandwidth of copies between its pinned memory and a device, one way.
    """

    cores: int | None
    bytes_per_ns: float | None


@dataclass(frozen=True)
class Box:
    """A profile of a box.

    Attributes:
        version: The version of the form; 3.
        name: The name of the box.
        basis: "measured", or "published, not measured".
        sources: The papers, data sheets or commands that say so.
        devices: Each of them, by number.
        links: The first link with a group that has two devices is that of the two.
        host: Their host.

    Raises:
        ValueError: A value is out of its range; the message names it.
    """

    version: int
    name: str
    basis: str
    sources: tuple[str, ...]
    devices: tuple[BoxDevice, ...]
    links: tuple[BoxLink, ...]
    host: BoxHost

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(
                f"version must be {VERSION}, got {self.version}. Use the pykern that wrote it"
            )
        if self.basis not in (MEASURED, PUBLISHED):
            raise ValueError(f"basis must be {MEASURED!r} or {PUBLISHED!r}, got {self.basis!r}")
        if not self.devices:
            raise ValueError("devices must be at least one, got none")
        for key, value in self._numbers():
            if not (isfinite(value) and value > 0):
                raise ValueError(f"{key} must be a finite number above 0, got {value:g}")
        for number, link in enumerate(self.links):
            for place, group in enumerate(link.groups):
                known = all(0 <= device < len(self.devices) for device in group)
                if not known or len(set(group)) < len(group):
                    raise ValueError(
                        f"links[{number}].groups[{place}] must have different devices of 0 to "
                        f"{len(self.devices) - 1}, got {list(group)}"
                    )

    def _numbers(self) -> Iterator[tuple[str, float]]:
        """All numbers that must be above 0, by their keys."""
        parts = {
            **{f"devices[{n}]": device for n, device in enumerate(self.devices)},
            **{f"links[{n}]": link for n, link in enumerate(self.links)},
            "host": self.host,
        }
        for key, part in parts.items():
            yield from _numbers_of(part, key)

    def require_devices(self, count: int) -> None:
        """Refuses more devices than there are."""
        if count > len(self.devices):
            raise ValueError(
                f"devices must be at most {len(self.devices)}, as many as the box has, got "
                f"{count}. Take fewer devices"
            )

    def require_alike(self) -> None:
        """Refuses devices that differ."""
        for number, device in enumerate(self.devices):
            if device.kind != self.devices[0].kind:
                raise ValueError(
                    f"devices[{number}] of the box must be like devices[0], got {device.name!r}. "
                    "Take a box of equal devices"
                )

    def link(self, first: int, second: int) -> BoxLink | None:
        """The link between two devices; None where none is told."""
        pair = {first, second}
        return next((of for of in self.links if any(pair <= set(g) for g in of.groups)), None)

    def first(self, count: int) -> Box:
        """The box with its first devices alone.

        Raises:
            ValueError: It does not have so many.
        """
        if not 1 <= count <= len(self.devices):
            raise ValueError(
                f"the box must have 1 to {len(self.devices)} devices, as {self.name}, got {count}. "
                "Write a profile of a larger one by its data sheet"
            )
        links = [
            replace(link, groups=tuple(_below(count, group) for group in link.groups))
            for link in self.links
        ]
        name = f"{count} of {self.name}" if count < len(self.devices) else self.name
        return replace(self, name=name, devices=self.devices[:count], links=tuple(links))


def _numbers_of(part: object, key: str) -> Iterator[tuple[str, float]]:
    for name, value in vars(part).items():
        # Nodes are numbers from 0.
        if isinstance(value, int | float) and name != "numa_node":
            yield f"{key}.{name}", value
        elif isinstance(value, tuple):
            for place, of in enumerate(value):
                if isinstance(of, RateBySize):
                    yield from _numbers_of(of, f"{key}.{name}[{place}]")


def _below(count: int, group: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(device for device in group if device < count)


def known(value: T | None, key: str) -> T:
    """A value of a box that a prediction needs.

    Raises:
        ValueError: The box does not tell it.
    """
    if value is None:
        raise ValueError(
            f"the box must tell its {key} for a prediction, got null. Write the figure into the "
            "file, by the data sheet"
        )
    return value
