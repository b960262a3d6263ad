"""Logs of all driver calls of pipelines, by each capture, replayed against the fake driver."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from bench.driver_log.steps import calls_of_step, recorded
from tests.driver_log.replay import without_wait_of_copy

from .frame import ROOT, Json, environment
from .tools import DEVICE
from .variants import CAPTURES

DRIVER = "libcuda.so.1"
KEPT = ROOT / "tests/driver_log/logs/fake"
MOST_BYTES = 1 << 20
# The most differences and violations that are told.
TOLD = 5


def run(folder: Path) -> Json:
    """The logs themselves are in the folder, one for each way to run a step."""
    now = environment()
    header = f"# Recorded from {now['gpu']}, at {now['commit']} on {now['date']}\n"
    found = {}
    for name, capture in CAPTURES.items():
        file = folder / f"driver_log.{name}.log"
        file.write_text(header + recorded(DRIVER, DEVICE, capture))
        found[name] = judged(file, KEPT / f"{name}.log")
    return found


def control() -> bool:
    """A log in which a copy does not wait for its source."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "without.log"
        file.write_text(without_wait_of_copy(recorded(DRIVER, DEVICE, capture=False)))
        return any("nothing orders" in text for text in replayed(file)["violations"])


def judged(file: Path, kept: Path) -> Json:
    """The figures of a log: what its replay finds; whether its last step has the kept calls.

    Raises:
        RuntimeError: the log is larger than a log of so small a pipeline should be.
    """
    log, size = file.read_text(), file.stat().st_size
    if size > MOST_BYTES:
        raise RuntimeError(f"{file} has {size} bytes, and should have at most {MOST_BYTES}")
    calls = calls_of_step(log)
    again = replayed(file)
    return {
        "bytes": size,
        "calls_of_step": Counter(call.split()[1] for call in calls),
        "calls_of_step_as_on_the_fake": calls == calls_of_step(kept.read_text()),
        "replayed": again["num_calls"],
        "differences": again["differences"][:TOLD],
        "violations": again["violations"][:TOLD],
    }


def replayed(file: Path) -> Json:
    """In a process of its own, since the fake driver is one for a process."""
    command = [sys.executable, "-m", "tests.driver_log.replay", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{file} cannot be replayed: {done.stderr[-2000:]}")
    found: Json = json.loads(done.stdout)
    return found
