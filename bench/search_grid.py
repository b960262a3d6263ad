"""The search against every published schedule at equal memory, over a grid of sizes.

    python -m bench.search_grid --budget 1000 --out bench/results/search_grid.jsonl
    python -m bench.search_grid --devices 4 8 --memory 0.5 --out grid.jsonl    # some of the cells
    python -m bench.search_grid --table grid.jsonl                             # what is there

A run that was interrupted goes on where it stopped: cells that the file has are not run again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pykern.plan import Costs
from pykern.search import auto, placement_name

from .kept import FOLDER
from .report import environment

# Costs of one device's share, in ms: alike, and the profile of the 1.5B model in table 6 of the
# zero-bubble paper (Qi, Wan, Huang, Lin, 2023, arXiv 2401.10241), with its latency.
COSTS = {
    "equal": Costs(1e6, 2e6),
    "measured": Costs(18.522e6, 27.423e6, 0.601e6, input_ns=18.086e6, weight_ns=9.337e6),
}
DEVICES = (4, 8, 16)
PER_DEVICE = (1, 2, 4, 8)
MEMORY = (0.5, 0.625, 0.75, 1.0)


@dataclass(frozen=True)
class Cell:
    """One size, its costs by name, its memory cap in 1F1B's and the budget in counted ms."""

    num_devices: int
    num_microbatches: int
    costs: str
    memory: float
    budget_ms: float
    max_chunks: int


@dataclass(frozen=True)
class Result:
    """The schedules that were found in a cell.

    Attributes:
        bubble: Makespan beyond a device's work, in forwards of its share; `bound` is of the bubble.
        published: The best published schedule under the cap, or empty.
        gain: Share of the published schedule's time that is saved, or None.
        work_ms: Counted work.
        seconds: Wall time of all, making the published plans included.
    """

    cell: Cell
    placement: str
    bubble: float
    bound: float
    proven: bool
    published: str
    published_bubble: float | None
    gain: float | None
    work_ms: float
    seconds: float


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    for devices, per_device, costs, memory in itertools.product(
        arguments.devices, arguments.per_device, arguments.costs, arguments.memory
    ):
        yield Cell(
            devices, devices * per_device, costs, memory, arguments.budget, arguments.max_chunks
        )


def run(cell: Cell) -> Result:
    costs = COSTS[cell.costs]
    start = time.perf_counter()
    found = auto(
        cell.num_devices,
        cell.num_microbatches,
        costs=costs,
        memory=cell.memory,
        budget_ms=cell.budget_ms,
        max_chunks=cell.max_chunks,
    )
    seconds = time.perf_counter() - start
    assert isinstance(costs.forward_ns, float)
    assert isinstance(costs.backward_ns, float)
    forward_ns = costs.forward_ns
    work_ns = cell.num_microbatches * (forward_ns + costs.backward_ns)
    published = min(found.seeds, key=found.seeds.__getitem__, default="")
    best_ns = found.seeds.get(published)
    # The search rounds times to a billionth.
    assert best_ns is None or found.makespan_ns <= best_ns * (1 + 1e-9), (cell, published)
    assert max(found.peak) <= cell.memory * cell.num_devices * (1 + 1e-9), cell
    return Result(
        cell=cell,
        placement=placement_name(found.plan.placement),
        bubble=(found.makespan_ns - work_ns) / forward_ns,
        bound=(found.bound_ns - work_ns) / forward_ns,
        proven=found.proven,
        published=published,
        published_bubble=None if best_ns is None else (best_ns - work_ns) / forward_ns,
        gain=None if best_ns is None else 1 - found.makespan_ns / best_ns,
        work_ms=found.work_ms,
        seconds=seconds,
    )


def load(path: Path) -> list[Result]:
    """The results of a file, whose first line is the environment."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return [Result(**{**line, "cell": Cell(**line["cell"])}) for line in lines]


def table(results: Iterable[Result]) -> str:
    rows = [
        "| P | M | costs | memory | bubble | bound | on | published | its bubble | gain | ms | s |",
        "|--:|--:|---|--:|--:|--:|---|---|--:|--:|--:|--:|",
    ]
    rows += [_row(result) for result in results]
    return "\n".join(rows)


def _row(result: Result) -> str:
    cell = result.cell
    published = ("none", "", "")
    if result.published_bubble is not None and result.gain is not None:
        published = (
            result.published,
            f"{result.published_bubble:.2f}",
            f"{result.gain:.1%}" if result.gain > 1e-9 else "equal",
        )
    return (
        f"| {cell.num_devices} | {cell.num_microbatches} | {cell.costs} | {cell.memory:g} "
        f"| {result.bubble:.2f} | {'optimal' if result.proven else f'{result.bound:.2f}'} "
        f"| {result.placement} | {' | '.join(published)} "
        f"| {result.work_ms:.0f} | {result.seconds:.1f} |"
    )


def summary(results: Sequence[Result]) -> str:
    """How many cells are better than the best published schedule, by memory."""
    rows = [
        "| memory | better | equal | of them proven optimal | nothing published fits |",
        "|--:|--:|--:|--:|--:|",
    ]
    for memory in sorted({result.cell.memory for result in results}):
        here = [result for result in results if result.cell.memory == memory]
        equal = [result for result in here if result.gain is not None and result.gain <= 1e-9]
        proven = sum(result.proven for result in equal)
        alone = sum(result.gain is None for result in here)
        better = len(here) - len(equal) - alone
        rows.append(f"| {memory:g} | {better} | {len(equal)} | {proven} | {alone} |")
    return "\n".join(rows)


def kept() -> Path:
    """The newest file of results that is kept."""
    return max(FOLDER.glob("search-grid_*.jsonl"), key=lambda file: file.stem.rpartition("_")[2])


def kept_summary() -> str:
    """Where the kept results are from, and how the search does in them."""
    file, results = kept(), load(kept())
    of = json.loads(file.read_text(encoding="utf-8").partition("\n")[0])
    budget = {result.cell.budget_ms for result in results}.pop()
    seconds = sum(result.seconds for result in results)
    return (
        f"From `{of['command']} --budget {budget:g}`: {len(results)} cells in {seconds:.0f} s, "
        f"{of['date']}, {of['cpu']}, one core, Python {of['python']}. The plans are the same on "
        f"any machine; the seconds are not. The data: [bench/results](../bench/results/"
        f"{file.name}).\n\n{summary(results)}"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--per-device", type=int, nargs="+", default=PER_DEVICE)
    parser.add_argument("--costs", choices=COSTS, nargs="+", default=list(COSTS))
    parser.add_argument("--memory", type=float, nargs="+", default=MEMORY)
    parser.add_argument("--budget", type=float, default=1000.0, help="counted ms per cell")
    parser.add_argument("--max-chunks", type=int, default=4)
    parser.add_argument("--out", type=Path, help="results are added to this file")
    parser.add_argument("--table", type=Path, help="only print what this file holds")
    return parser.parse_args()


TABLES = {"summary": kept_summary, "cells": lambda: table(load(kept()))}


def main() -> None:
    arguments = parse()
    if arguments.table:
        results = load(arguments.table)
        print(table(results), summary(results), sep="\n\n")
        return
    results = load(arguments.out) if arguments.out else []
    if arguments.out and not results:
        header = json.dumps(environment("python -m bench.search_grid"))
        arguments.out.write_text(header + "\n", encoding="utf-8")
    known = {result.cell for result in results}
    for cell in cells(arguments):
        if cell in known:
            continue
        result = run(cell)
        results.append(result)
        print(_row(result), flush=True)
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
    print(table(results), summary(results), sep="\n\n")


if __name__ == "__main__":
    main()
