"""Claim: without a flush, PipeDream and PipeDream-2BW keep the devices busy from batch to batch.

Training steps with SGD, beside 1F1B with its flush and one update after each batch, which is the
baseline. Two cases: stages that wait instead of computing, whose times no other work on the machine
and no shared core changes, and a GPT on two workers. Updates are part of the step for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern.models import gpt
from tests.runtime import update_rules
from tests.runtime.update_rules import Rules

from .asleep import Asleep
from .harness import Contender, Record, interleave, judge

_SETTLE_S = 0.02
_RULES = {"pipedream": update_rules.pipedream, "pipedream_2bw": update_rules.two_buffered}


class _Waits(nn.Linear):
    """A stage of one small product that takes a time of its own."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__(width, width)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Asleep.apply(super().forward(x), self.seconds)
        return y


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


@dataclass(frozen=True)
class Task:
    """A model and batches to train.

    Attributes:
        stages: layers, one for each device.
        batch: inputs and target.
        ideal_ms: of a step whose devices are busy all the time; None where that is not known.
    """

    stages: nn.Sequential
    batch: tuple[Tensor, Tensor]
    num_microbatches: int
    ideal_ms: float | None = None


Report = Callable[[list[Record]], None]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_microbatches", [4, 8, 16])
def test_stages_that_wait(
    num_microbatches: int, benchmark: BenchmarkFixture, smoke: bool, report: Report
) -> None:
    """A forward of 10 ms and a backward of 20 ms in each of four stages."""
    width, seconds = 8, 0.0005 if smoke else 0.01
    stages = nn.Sequential(*(_Waits(width, seconds) for _ in range(4)))
    x = torch.randn(num_microbatches, width)
    task = Task(stages, (x, x), num_microbatches, 3e3 * seconds * num_microbatches)
    samples = _samples(task, benchmark, smoke=smoke)
    if not smoke:
        case = f"4 stages that wait 10 + 20 ms, {num_microbatches} microbatches"
        report(judge("async", case, samples, "one_f_one_b", partial(_figures, task)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_microbatches", [4, 8])
def test_gpt(
    num_microbatches: int, benchmark: BenchmarkFixture, smoke: bool, report: Report
) -> None:
    """Half blocks of a GPT, from hidden states to hidden states, so that both stages are alike."""
    width, length, rows = (16, 8, 8) if smoke else (256, 64, 16)
    layers = list(gpt(vocab=8, layers=4, width=width, context=length))[1:-1]
    stages = nn.Sequential(nn.Sequential(*layers[:4]), nn.Sequential(*layers[4:]))
    x, y = torch.randn(2, rows, length, width)
    task = Task(stages, (x, y), num_microbatches)
    samples = _samples(task, benchmark, smoke=smoke)
    if not smoke:
        case = f"GPT, 2 stages, {num_microbatches} microbatches of {rows // num_microbatches}"
        report(judge("async", case, samples, "one_f_one_b", partial(_figures, task)))


def _figures(task: Task, median_ms: float, baseline_ms: float) -> dict[str, float]:
    figures = {"rows/s": len(task.batch[0]) / median_ms * 1e3, "speed-up": baseline_ms / median_ms}
    if task.ideal_ms is not None:
        figures["busy"] = task.ideal_ms / median_ms
    return figures


def _samples(task: Task, benchmark: BenchmarkFixture, *, smoke: bool) -> dict[str, list[float]]:
    """Times of steps, once all contenders have been seen to train by their rule."""
    for name in _RULES:
        _assert_rule(task, name)
    contenders = [_synchronous(task), *(_asynchronous(task, name) for name in _RULES)]
    return interleave(benchmark, contenders, 1 if smoke else 15, settle_s=_SETTLE_S)


def _pipeline(task: Task, schedule: str, **more: Any) -> pykern.Pipeline:
    kind = pykern.AsyncPipeline if "optimizer" in more else pykern.Pipeline
    return kind(
        copy.deepcopy(task.stages),
        devices=f"cpu:{len(task.stages)}",
        schedule=schedule,
        microbatches=task.num_microbatches,
        loss_fn=F.mse_loss,
        balance="layers",
        **_options(task, schedule),
        **more,
    )


def _options(task: Task, schedule: str) -> dict[str, Any]:
    return {"group": task.num_microbatches} if schedule == "pipedream_2bw" else {}


def _assert_rule(task: Task, name: str) -> None:
    """Weights after three batches are those of the rule, to the bit."""
    torch.set_num_threads(1)
    plain = copy.deepcopy(task.stages)
    group = _options(task, name).get("group", 1)
    rules = Rules(list(plain), _sgd(plain.parameters()), _RULES[name], group, F.mse_loss)
    rules.start()
    rows = [len(part) for part in task.batch[0].chunk(task.num_microbatches)]
    with _pipeline(task, name, optimizer=_sgd) as pipe:
        for _ in range(3):
            pipe.step(task.batch[0], target=task.batch[1])
            rules.batch(*task.batch, rows)
        pipe.flush()
        for ours, theirs in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), name


def _threads(task: Task) -> None:
    torch.set_num_threads(min(2, len(task.stages)))


def _synchronous(task: Task) -> Contender:
    pipe = _pipeline(task, "one_f_one_b")
    optimizer = _sgd(pipe.parameters())

    def step() -> float:
        loss = pipe.step(task.batch[0], target=task.batch[1])
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return Contender("one_f_one_b", step, dict, partial(_threads, task))


def _asynchronous(task: Task, name: str) -> Contender:
    pipe = _pipeline(task, name, optimizer=_sgd)

    def step() -> float:
        return pipe.step(task.batch[0], target=task.batch[1]).item()

    return Contender(name, step, dict, partial(_threads, task))
