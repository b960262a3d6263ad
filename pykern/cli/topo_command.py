"""`pykern topo`: cores, caches, memory and hand-overs of this machine."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ..topo import Topology


def topo() -> None:
    """Print this machine's cores, caches, NUMA nodes, copy bandwidth and hand-over time.

    A terminal gets a table, a file or a pipe plain lines.
    """
    from rich.console import Console
    from rich.table import Table

    from ..topo import measure

    rows = list(_rows(measure()))
    if not sys.stdout.isatty():
        typer.echo("\n".join(": ".join(row) for row in rows))
        return
    table = Table("fact", "value")
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)


def _rows(found: "Topology") -> Iterator[tuple[str, str]]:
    yield "cores", f"{found.cores} usable"
    for cache in found.caches:
        yield f"L{cache.level} {cache.kind}", f"{cache.size}, CPUs {cache.cpus}"
    for node in found.nodes:
        yield f"NUMA node {node.number}", f"CPUs {node.cpus}"
    for size, rate in found.copy_bytes_per_ns.items():
        yield f"copy of {size // 1024} KiB", f"{rate:.1f} GB/s on one thread"
    yield "hand-over", f"{found.handover_ns / 1000:.1f} µs to a short action of the next stage"
