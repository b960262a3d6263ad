"""The report of a measurement: where it was taken, a table of it, and a file that keeps it."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pykern.benchmark.box import processor

from .harness import Record

Environment = Mapping[str, str | int | float]


def environment(command: str) -> Environment:
    """The facts that a number means nothing without."""
    now = datetime.now(UTC)
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "pykern": version("pykern-runtime"),
        "commit": _commit(),
        "date": now.strftime("%Y-%m-%d"),
        "time": now.strftime("%H:%M"),
        "command": command,
        "clock": "wall time, CPU only",
    }


def _commit() -> str:
    """The commit that is measured, marked where files differ from it; needs git and a checkout."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    here = Path(__file__).parent
    try:
        done = subprocess.run(describe, cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def save(folder: Path, header: Environment, records: Sequence[Record]) -> list[Path]:
    """Writes one file of JSON lines per claim: the environment, then a record per line."""
    hardware = re.sub(r"[^a-z0-9]+", "-", f"{header['cpu']} {header['cores']} cores".lower())
    folder.mkdir(exist_ok=True)
    paths = []
    for claim in dict.fromkeys(record.claim for record in records):
        path = folder / f"{claim}_{hardware}_{header['date']}.jsonl"
        lines = [header, *(asdict(record) for record in records if record.claim == claim)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        paths.append(path)
    return paths


def tables(records: Sequence[Record]) -> str:
    """One table per case, as text."""
    console = Console(file=StringIO(), width=120)
    with console.capture() as capture:
        for case in dict.fromkeys((record.claim, record.case) for record in records):
            rows = [record for record in records if (record.claim, record.case) == case]
            console.print(_table(f"{case[0]}: {case[1]}", rows))
    return capture.get()


def _table(title: str, rows: Sequence[Record]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    figures = list(dict.fromkeys(name for row in rows for name in row.figures))
    for heading in ("median ms", "20 %", "80 %", "noise", "ratio", *figures):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for row in rows:
        table.add_row(
            row.contender,
            *(f"{ms:.2f}" for ms in (row.median_ms, row.p20_ms, row.p80_ms)),
            f"{row.noise:.1%}",
            f"{row.ratio:.3f}",
            *(f"{row.figures[name]:,.2f}" if name in row.figures else "" for name in figures),
            row.verdict,
        )
    return table
