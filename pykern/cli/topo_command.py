"""`pykern topo`: cores, caches, memory, hand-overs and GPUs of this machine."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .errors import bad_input
from .reports import print_and_save, require_files
from .values import BoxProfile

if TYPE_CHECKING:
    from rich.table import Table

    from ..boxes import Box, BoxDevice, RateBySize
    from ..topo import MeasuredLink, Topology

# The most caches that are alike and still named by their CPUs: a box may have hundreds.
_NAMED_CACHES = 4
# Colours of a matrix, from slow to fast, by the share of its fastest link.
_SHADES = ((0.25, "red"), (0.5, "yellow"), (0.8, "green"), (1.0, "bold green"))


def topo(
    box: BoxProfile = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Write the profile of the box here.", show_default="none"),
    ] = None,
    heatmap: Annotated[
        Path | None,
        typer.Option(
            help="Draw bandwidths and latencies between devices here, as .svg, .png or .pdf.",
            show_default="none",
        ),
    ] = None,
) -> None:
    """Print this machine's cores, caches, NUMA nodes, copy bandwidth, hand-over time and GPUs.

    With --box, print a profile instead. A terminal gets tables, a file or a pipe plain lines.
    """
    from ..boxes import load, save, save_heat_map

    with bad_input():
        require_files(json=json, heatmap=heatmap)
        if box is not None:
            profile = load(box)
            tables = partial(_print, list(_box_rows(profile)), [])
        else:
            from ..topo import as_box, measure

            found = measure()
            profile = as_box(found)
            rows = [*_rows(found), *_gpu_rows(found), *_size_rows(profile)]
            tables = partial(_print, rows, list(_link_rows(found)), found)
    print_and_save(
        tables, (json, partial(save, profile)), (heatmap, partial(save_heat_map, profile))
    )


def _print(
    rows: list[tuple[str, str]],
    links: list[tuple[str, str]],
    found: "Topology | None" = None,
) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not sys.stdout.isatty():
        typer.echo("\n".join(": ".join(row) for row in (*rows, *links)))
        return
    table = Table("fact", "value")
    for row in rows:
        # Rich takes words in brackets within plain strings for styles, and leaves them out.
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    console.print(table)
    if found is not None and found.links:
        console.print(_matrix(found))


def _box_rows(box: "Box") -> Iterator[tuple[str, str]]:
    yield "box", f"{box.name} ({box.basis})"
    for number, device in enumerate(box.devices):
        facts = [
            device.name,
            f"{device.memory_bytes / 1e9:.0f} GB" if device.memory_bytes else "",
            f"{device.memory_bytes_per_ns:g} GB/s" if device.memory_bytes_per_ns else "",
            f"{device.flops_per_ns / 1e3:g} TFLOP/s" if device.flops_per_ns else "",
        ]
        yield f"device {number}", ", ".join(fact for fact in facts if fact)
        if device.numa_node is not None:
            yield f"device {number} is near", f"NUMA node {device.numa_node}"
        yield from _host_rows(f"device {number}", device)
    for link in box.links:
        among = "; ".join(" ".join(map(str, group)) for group in link.groups)
        rate, latency = link.bytes_per_ns, link.latency_ns / 1000
        yield f"between {among}", f"{rate:g} GB/s one way, {latency:g} µs"
        if link.by_size:
            yield f"between {among} by size", _sizes(link.by_size)
        if link.copy_slows:
            yield f"between {among} beside products", f"these take {link.copy_slows:.2f} x"
    if box.host.bytes_per_ns:
        yield "host and a device", f"{box.host.bytes_per_ns:g} GB/s one way"
    for source in box.sources:
        yield "source", source


def _size_rows(profile: "Box") -> Iterator[tuple[str, str]]:
    """The rows of GPUs' copies by size."""
    for number, device in enumerate(profile.devices):
        yield from _host_rows(f"GPU {number}", device)
    for link in profile.links:
        if any(rate.both_ways for rate in link.by_size):
            yield f"GPUs {' and '.join(map(str, link.groups[0]))} by size", _sizes(link.by_size)


def _host_rows(name: str, device: "BoxDevice") -> Iterator[tuple[str, str]]:
    for way, rates in (("from", device.from_host), ("to", device.to_host)):
        if rates:
            yield f"{name} {way} host", _sizes(rates)


def _sizes(rates: "Sequence[RateBySize]") -> str:
    """Bandwidths by size, those of both directions in brackets."""
    texts = (
        f"{_size(rate.num_bytes)} {rate.bytes_per_ns:.3g}"
        + (f" [{rate.both_ways:.3g}]" if rate.both_ways else "")
        for rate in rates
    )
    told = " [while both send]" if any(rate.both_ways for rate in rates) else ""
    return f"{', '.join(texts)} GB/s{told}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"


def _rows(found: "Topology") -> Iterator[tuple[str, str]]:
    yield "cores", f"{found.cores} usable"
    for (level, kind, size), alike in groupby(found.caches, attrgetter("level", "kind", "size")):
        yield f"L{level} {kind}", f"{size}, {_shared([cache.cpus for cache in alike])}"
    for node in found.nodes:
        yield f"NUMA node {node.number}", f"CPUs {node.cpus}"
    for size, rate in found.copy_bytes_per_ns.items():
        yield f"copy of {size // 1024} KiB", f"{rate:.1f} GB/s on one thread"
    if found.flops_per_ns is not None:
        yield "products in float32", f"{found.flops_per_ns:.1f} GFLOP/s on one thread"
    yield "hand-over", f"{found.handover_ns / 1000:.1f} µs to an action of the next stage"


def _gpu_rows(found: "Topology") -> Iterator[tuple[str, str]]:
    for number, gpu in enumerate(found.gpus):
        name = f"GPU {number}"
        major, minor = gpu.capability
        memory = gpu.memory_bytes / 2**30
        near = "" if gpu.numa_node is None else f", near NUMA node {gpu.numa_node}"
        sms = f"{gpu.num_processors} SMs, sm_{major}{minor}"
        yield name, f"{gpu.name}, {memory:.0f} GiB, {sms}{near}"
        rate, flops = gpu.memory_bytes_per_ns, gpu.flops_per_ns / 1e3
        half = "bfloat16" if major >= 8 else "float16"
        yield f"{name} rates", f"{rate:.0f} GB/s of memory, {flops:.1f} TFLOP/s in {half}"
        pinned, back = (max(rates.values()) for rates in (gpu.from_host, gpu.to_host))
        yield (
            f"{name} and host",
            f"{pinned:.1f} GB/s from pinned memory, {back:.1f} to it, {gpu.from_pageable:.1f} from "
            f"pageable memory; beside copies, matrix products take {gpu.copy_slows:.2f} x",
        )
    for number, state in enumerate(found.managed.states):
        facts = [
            f"PCIe {state.pcie}" if state.pcie else "",
            f"{state.clock_mhz} of {state.max_clock_mhz} MHz" if state.clock_mhz else "",
            f"slowed by {', '.join(state.slowed_by)}" if state.slowed_by else "",
            f"{state.uncorrected_errors} errors of memory" if state.uncorrected_errors else "",
        ]
        yield f"GPU {number} now", ", ".join(fact for fact in facts if fact) or "tells nothing"


def _link_rows(found: "Topology") -> Iterator[tuple[str, str]]:
    for link in found.links:
        facts = [
            f"{max(link.bytes_per_ns.values()):.1f} GB/s",
            f"{link.latency_ns / 1000:.1f} µs for 4 KiB",
            f"{max(link.both_ways.values()):.1f} GB/s while both send",
            f"{link.among_all:.1f} GB/s while all send" if link.among_all else "",
            f"{link.by_kernel:.1f} GB/s by a kernel" if link.by_kernel else "",
            f"products beside it take {link.copy_slows:.2f} x",
            "direct" if link.is_direct else "by the host",
            _way(found, link),
            "" if link.arrives else "WRONG BYTES ARRIVE",
        ]
        text = ", ".join(fact for fact in facts if fact)
        yield f"GPU {link.sender} to GPU {link.receiver}", text


def _matrix(found: "Topology") -> "Table":
    """The bandwidth of each link, from the GPU of the row to that of the column."""
    from rich.table import Table
    from rich.text import Text

    table = Table("GB/s", *(f"GPU {number}" for number in range(len(found.gpus))))
    table.caption = "the second line: µs for 4 KiB, and the way"
    links = {_ends(link): link for link in found.links}
    rates = {ends: max(link.bytes_per_ns.values()) for ends, link in links.items()}
    fastest = max(rates.values())
    for sender in range(len(found.gpus)):
        cells = [Text("")] * len(found.gpus)
        for receiver in range(len(found.gpus)):
            link = links.get((sender, receiver))
            if link is None:
                continue
            rate = rates[sender, receiver]
            shade = next(colour for share, colour in _SHADES if rate <= share * fastest)
            way = _way(found, link) or ("direct" if link.is_direct else "host")
            text = f"{rate:.1f}\n{link.latency_ns / 1000:.1f} {way}"
            wrong = "" if link.arrives else "\nWRONG BYTES"
            cells[receiver] = Text(text + wrong, style=shade if link.arrives else "bold red")
        table.add_row(f"GPU {sender}", *cells)
    return table


def _ends(link: "MeasuredLink") -> tuple[int, int]:
    return link.sender, link.receiver


def _way(found: "Topology", link: "MeasuredLink") -> str:
    """The way as NVIDIA's library names it; empty if it does not tell."""
    return found.managed.ways.get((min(_ends(link)), max(_ends(link))), "")


def _shared(cpus: Sequence[str]) -> str:
    """The CPUs of each of some caches that are alike, in short where there are many."""
    from ..topo.system import cpus_in

    if len(cpus) <= _NAMED_CACHES:
        return "CPUs " + " and ".join(cpus)
    counts = [len(cpus_in(of)) for of in cpus]
    share = f"{'' if min(counts) == max(counts) else 'up to '}{max(counts)}"
    return f"{len(cpus)} of them, each for {share} CPU{'' if share == '1' else 's'}"
