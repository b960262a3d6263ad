"""Claim: a small GPT trains at least as fast as with torch.distributed.pipelining on two cores.

Forward and backward, no optimizer. Baseline: the best of torch's schedules, in two gloo processes.
The unpipelined model on one and on two threads tells what pipelining is worth here at all.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import pykern
from pykern.models import next_token_loss

from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge
from .torch_peers import Task, small_gpt, torch_peers

_NUM_DEVICES = 2

# Schedules, each with the number of stages that it cuts the model into.
_PYKERN = {
    "gpipe": 2,
    "one_f_one_b": 2,
    "zb_h1": 2,
    "interleaved": 4,
    "hanayo": 4,
    "interleaved_zb": 4,
    "zb_v": 4,
}
_TORCH = {
    "GPipe": 2,
    "1F1B": 2,
    "Interleaved1F1B": 4,
    "InterleavedZeroBubble": 4,
    "ZBVZeroBubble": 4,
    "DualPipeV": 4,
}

# Threads of a contender with two of them spin for some milliseconds after their last work.
_SETTLE_S = 0.02


@pytest.mark.timeout(900)
def test_pipeline(
    benchmark: BenchmarkFixture,
    smoke: bool,
    report: Callable[[list[Record]], None],
    tmp_path: Path,
) -> None:
    """Tokens per second of every contender."""
    task = small_gpt(layers=2, width=16, seq=8, batch=8) if smoke else small_gpt(4, 256, 128, 16)
    torch.set_num_threads(1)
    case = f"small GPT, 2 stages {task.balance(2)}, 4 stages {task.balance(4)} of the time"
    with torch_peers(task, _NUM_DEVICES, tmp_path, _TORCH) as torch_contenders:
        contenders = [
            _plain(task, threads=1, parts=task.num_microbatches),
            _plain(task, threads=1, parts=1),
            _plain(task, threads=2, parts=task.num_microbatches),
            _plain(task, threads=2, parts=1),
            *(_pykern(task, schedule) for schedule in _PYKERN),
            *torch_contenders,
        ]
        assert_same_answer(contenders)
        samples = interleave(benchmark, contenders, 1 if smoke else 15, settle_s=_SETTLE_S)
    if smoke:
        return
    names = [contender.name for contender in torch_contenders]
    best = min(names, key=lambda name: statistics.median(samples[name]))

    def figures(median_ms: float, best_ms: float) -> dict[str, float]:
        return {"tokens/s": task.ids.numel() / median_ms * 1e3, "speed-up": best_ms / median_ms}

    report(judge("pipeline", case, samples, baseline=best, figures=figures))


def _plain(task: Task, threads: int, parts: int) -> Contender:
    """The model without a pipeline: whole batch, or microbatch by microbatch."""
    model = copy.deepcopy(task.model)
    share = torch.tensor(1 / parts)

    def step() -> Tensor:
        total = torch.zeros(())
        for ids, target in zip(task.ids.chunk(parts), task.target.chunk(parts), strict=True):
            loss = next_token_loss(model(ids), target)
            loss.backward(share)
            total += loss.detach()
        return total * share

    cut = "whole batch" if parts == 1 else f"{parts} microbatches"
    name = f"plain model, {threads} thread{'s' * (threads > 1)}, {cut}"
    return in_this_process(name, model, threads, step)


def _pykern(task: Task, schedule: str) -> Contender:
    """Two workers. They share the caller's two threads out, so that each has one."""
    model, num_stages = copy.deepcopy(task.model), _PYKERN[schedule]
    pipe = pykern.Pipeline(
        model,
        devices=f"cpu:{_NUM_DEVICES}",
        schedule=schedule,
        microbatches=task.num_microbatches,
        loss_fn=next_token_loss,
        balance=task.cut(num_stages),
    )
    return in_this_process(
        f"pykern {schedule}, {num_stages} stages",
        model,
        _NUM_DEVICES,
        lambda: pipe.step(task.ids, target=task.target),
    )
