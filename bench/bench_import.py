"""Claim: to import pykern costs little beside torch, which it cannot do without.

Fresh interpreters. Baseline: one that imports torch alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .harness import Contender, Record, interleave, judge

_IMPORTS = {
    "torch": "import torch",
    "pykern": "import torch; from pykern import *",
    "torch.distributed.pipelining": "import torch; from torch.distributed.pipelining import *",
    "pykern, to plan": "import pykern.plan, pykern.schedules",
}


@pytest.mark.timeout(300)
def test_import(
    benchmark: BenchmarkFixture, smoke: bool, report: Callable[[list[Record]], None]
) -> None:
    """Milliseconds of an interpreter that does nothing else."""
    contenders = [_importing(name, code) for name, code in _IMPORTS.items()]
    samples = interleave(benchmark, contenders, rounds=1 if smoke else 15)
    if not smoke:

        def figures(median_ms: float, torch_ms: float) -> dict[str, float]:
            return {"ms beyond torch": median_ms - torch_ms}

        report(judge("import", "a fresh interpreter", samples, "torch", figures))


def _importing(name: str, code: str) -> Contender:
    def step() -> float:
        subprocess.run([sys.executable, "-c", code], check=True)
        return 0.0

    return Contender(name, step, dict, lambda: None)
