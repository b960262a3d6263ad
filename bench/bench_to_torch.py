"""Claim: plans run on torch's own runtime as fast as the schedules that it comes with.

Forward and backward of a small GPT in two gloo processes, a core each. Baseline: the best of
torch's schedules. Two plans are also run with the sends and receives that torch adds to them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from pykern.plan import Plan
from pykern.schedules import hanayo, interleaved, interleaved_zb, zb_v
from pykern.search import auto

from .harness import Record, assert_same_answer, interleave, judge
from .torch_peers import PlanOnTorch, small_gpt, torch_peers

_NUM_PROCESSES = 2

# Schedules of torch's, each with the number of stages that it cuts the model into.
_TORCH = {"1F1B": 2, "Interleaved1F1B": 4, "InterleavedZeroBubble": 4, "ZBVZeroBubble": 4}


def _plans(num_microbatches: int) -> dict[str, Plan]:
    count = num_microbatches
    return {
        "interleaved": interleaved(_NUM_PROCESSES, count),
        "interleaved_zb": interleaved_zb(_NUM_PROCESSES, count),
        "zb_v": zb_v(_NUM_PROCESSES, count),
        "hanayo": hanayo(_NUM_PROCESSES, count),
        "searched": auto(_NUM_PROCESSES, count, max_chunks=2).plan,
        "searched, 3/4 of the memory": auto(_NUM_PROCESSES, count, memory=0.75, max_chunks=2).plan,
    }


@pytest.mark.timeout(900)
def test_to_torch(
    benchmark: BenchmarkFixture,
    smoke: bool,
    report: Callable[[list[Record]], None],
    tmp_path: Path,
) -> None:
    """Milliseconds per step of every contender."""
    task = small_gpt(2, 16, 8, 8) if smoke else small_gpt(4, 256, 128, 16)
    torch.set_num_threads(1)
    plans = {}
    for name, plan in _plans(task.num_microbatches).items():
        plans[f"plan {name}"] = PlanOnTorch(plan)
        if name in {"hanayo", "searched"}:
            plans[f"plan {name}, torch's sends"] = PlanOnTorch(plan, by_torch=True)
    with torch_peers(task, _NUM_PROCESSES, tmp_path, _TORCH, plans) as contenders:
        assert_same_answer(contenders)
        samples = interleave(benchmark, contenders, 1 if smoke else 9)
    if smoke:
        return
    names = [one.name for one in contenders if one.name.startswith("torch ")]
    best = min(names, key=lambda name: statistics.median(samples[name]))
    case = f"small GPT, 4 stages {task.balance(4)} of the time, 8 microbatches"
    tokens = task.ids.numel()

    def figures(median_ms: float, best_ms: float) -> dict[str, float]:
        return {"tokens/s": tokens / median_ms * 1e3, "speed-up": best_ms / median_ms}

    report(judge("to_torch", case, samples, baseline=best, figures=figures))
