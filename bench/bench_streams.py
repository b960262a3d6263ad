"""Claim: issuing an action to GPUs costs less than a microsecond beside the driver's own time.

1F1B over eight devices on a driver that does nothing: what is left is the order, the waits, the
records, the copies and the launches of pykern. An action counts with its copy and all their calls.
Baseline: the same steps with an empty Python function called for each action.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .harness import Record, judge
from .shared_library import ROOT, compile_library

FOLDER = ROOT / "bench/null_driver"

Report = Callable[[list[Record]], None]


@pytest.fixture(scope="module")
def null_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("null_driver") / "null_driver.so"
    compile_library([FOLDER / "null_driver.cpp"], library, "-O2")
    return library


def test_streams(
    null_driver: Path, benchmark: BenchmarkFixture, smoke: bool, report: Report
) -> None:
    """Nanoseconds per action, 8 stages on 8 devices."""
    num_microbatches, rounds = (8, 1) if smoke else (64, 300)
    sizes = str(num_microbatches), str(rounds)
    steps = [sys.executable, "-m", "bench.null_driver.steps", str(null_driver), *sizes]
    # The rounds are the other process's, which has no other driver yet.
    ran = benchmark.pedantic(
        lambda: subprocess.run(steps, capture_output=True, text=True, check=True, cwd=ROOT),
        rounds=1,
    )
    found = json.loads(ran.stdout)
    assert found["num_actions"] == 2 * 8 * num_microbatches
    if smoke:
        return

    def figures(median_ms: float, _: float) -> dict[str, float]:
        return {"ns per action": median_ms * 1e6 / found["num_actions"]}

    case = f"1F1B P=8 M={num_microbatches}"
    report(judge("streams", case, found["samples"], "called", figures))
