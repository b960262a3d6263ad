"""Claim: issuing a Triton kernel directly costs the host less than issuing it by Triton's JIT.

The operations run on a stand-in for a GPU, which does nothing. Baseline: the same operations, whose
launches go by way of the JIT.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from pytest_benchmark.fixture import BenchmarkFixture

from .harness import Record, judge
from .launches import CALLS

ROOT = Path(__file__).parents[1]


def test_launches(
    benchmark: BenchmarkFixture,
    smoke: bool,
    report: Callable[[list[Record]], None],
    tmp_path: Path,
) -> None:
    """Microseconds of an operation, of CPU time."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.launches", "1" if smoke else "100"]
    ran = benchmark.pedantic(
        lambda: subprocess.run(
            command,
            env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
        ),
        rounds=1,
    )
    for operation, samples in json.loads(ran.stdout).items():
        if not smoke:
            report(
                judge(
                    "launches",
                    operation,
                    samples,
                    "JIT",
                    lambda median_ms, _: {"us": median_ms * 1e3 / CALLS},
                )
            )
