"""Bytes of memory that each fused operation moves, as ncu counts them, beside an ideal kernel's."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from .each_operation import MARK
from .frame import ROOT, Json

BYTES = ("dram__bytes_read.sum", "dram__bytes_write.sum")
NS = "gpu__time_duration.sum"
COUNTED = (
    *("ncu", "--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base"),
    *("--metrics", ",".join([*BYTES, NS])),
)

Row = dict[str, str]


def run(folder: Path) -> Json:
    return counted(folder)


def control() -> bool:
    """An operation with a copy of its argument, which an ideal kernel does not make."""
    with tempfile.TemporaryDirectory() as scratch:
        alone, copied = counted(Path(scratch), "planted").values()
    return bool(copied["by_ideal"] > 1.1 * alone["by_ideal"])


def counted(folder: Path, *arguments: str) -> Json:
    """The figures of each operation that `each_operation` runs."""
    log = folder / "ncu.csv"
    program = [sys.executable, "-m", "bench.gpu.each_operation", *arguments]
    done = subprocess.run(
        [*COUNTED, "--log-file", log, *program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"ncu ended with {done.returncode}: {done.stdout[-2000:]}")
    names = re.findall(r"^operation (\d+) (.*)$", done.stdout, re.MULTILINE)
    rows = operations_of(list(kernels_in(log.read_text())))
    return {name: figures(int(ideal), of) for (ideal, name), of in zip(names, rows, strict=True)}


def kernels_in(log: str) -> Iterator[Row]:
    """The kernels of a log of ncu, behind the line with the units."""
    lines = [line for line in log.splitlines() if line.startswith('"')]
    for number, row in enumerate(csv.DictReader(lines)):
        if number > 0:
            yield row


def operations_of(rows: list[Row]) -> list[list[Row]]:
    """The kernels of each operation, which a mark ends."""
    parts = groupby(rows, lambda row: MARK in row["Kernel Name"])
    return [list(part) for is_mark, part in parts if not is_mark]


def figures(ideal_bytes: int, rows: list[Row]) -> Json:
    num_bytes = sum(int(row[name].replace(",", "")) for row in rows for name in BYTES)
    return {
        "kernels": len(rows),
        "bytes": num_bytes,
        "by_ideal": num_bytes / ideal_bytes,
        "ms": sum(float(row[NS].replace(",", "")) for row in rows) / 1e6,
    }
