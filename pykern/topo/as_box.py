"""The profile of a machine that was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..boxes import Box, BoxDevice, BoxHost, BoxLink, RateBySize
from ..boxes.box import MEASURED, VERSION
from ..columns import counted
from .box import Topology
from .links import MeasuredLink


def as_box(found: Topology) -> Box:
    """The GPUs of a machine as devices; without GPUs, the cores that CPU workers would keep busy.

    A link is as fast as the slower of its two directions.
    """
    host_rates = [max(rates.values()) for of in found.gpus for rates in (of.from_host, of.to_host)]
    host = BoxHost(found.cores, min(host_rates, default=None))
    if found.gpus:
        name = f"{len(found.gpus)} x {found.gpus[0].name}"
        devices = [
            BoxDevice(
                gpu.name,
                gpu.memory_bytes,
                gpu.memory_bytes_per_ns,
                gpu.flops_per_ns,
                gpu.capability,
                gpu.num_processors,
                gpu.numa_node,
                _by_size(gpu.from_host),
                _by_size(gpu.to_host),
            )
            for gpu in found.gpus
        ]
        links = _links(found.links)
    else:
        name = counted(found.cores, "core")
        rate = found.copy_bytes_per_ns[max(found.copy_bytes_per_ns)]
        core = BoxDevice("CPU core", None, rate, found.flops_per_ns, None, None)
        devices = [core] * found.cores
        sizes = _by_size(found.copy_bytes_per_ns)
        links = [BoxLink((tuple(range(found.cores)),), rate, found.handover_ns, sizes)]
    sources = ("pykern topo",)
    return Box(VERSION, name, MEASURED, sources, tuple(devices), tuple(links), host)


def _links(measured: tuple[MeasuredLink, ...]) -> list[BoxLink]:
    both: dict[tuple[int, int], list[MeasuredLink]] = {}
    for link in measured:
        ends = min(link.sender, link.receiver), max(link.sender, link.receiver)
        both.setdefault(ends, []).append(link)
    return [
        BoxLink(
            (ends,),
            min(max(link.bytes_per_ns.values()) for link in ways),
            max(link.latency_ns for link in ways),
            _by_size(
                _slower([link.bytes_per_ns for link in ways]),
                _slower([link.both_ways for link in ways]),
            ),
            max(link.copy_slows for link in ways),
        )
        for ends, ways in both.items()
    ]


def _slower(rates: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {size: min(of[size] for of in rates) for size in rates[0]}


def _by_size(
    rates: Mapping[int, float], both_ways: Mapping[int, float] | None = None
) -> tuple[RateBySize, ...]:
    return tuple(
        RateBySize(size, rate, None if both_ways is None else both_ways[size])
        for size, rate in rates.items()
    )
