"""Claim: a loss outside of the pipeline costs next to nothing beside one within a step.

Both run all forwards first, GPipe's order. torchgpipe and fairscale's Pipe, whose losses are always
outside, run on the same layers where they are installed, on one thread, as on one device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

import pykern
from pykern import schedules

from .bench_peers import gpt_task, tiny_task
from .contenders import Task, fairscale, torchgpipe
from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge

_NUM_STAGES = 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["tiny", "gpt"])
def test_outside(
    kind: str, benchmark: BenchmarkFixture, smoke: bool, report: Callable[[list[Record]], None]
) -> None:
    """A step of four stages on one worker, its loss in it or outside."""
    if not smoke and os.environ.get("OMP_NUM_THREADS") != "1":
        pytest.fail("run this with OMP_NUM_THREADS=1: peers compute on threads of their own")
    case, task = tiny_task(smoke) if kind == "tiny" else gpt_task(smoke)
    contenders = [_within(task), _outside(task)]
    for older in (torchgpipe, fairscale):
        with suppress(ImportError):
            contenders.append(older(task, _NUM_STAGES))
    assert_same_answer(contenders, tolerance=1e-4)
    rounds = 1 if smoke else 100 if kind == "tiny" else 20
    samples = interleave(benchmark, contenders, rounds)
    if smoke:
        return
    num_actions = 2 * task.num_microbatches * _NUM_STAGES

    def figures(median_ms: float, within_ms: float) -> dict[str, float]:
        return {"us beyond, per action": (median_ms - within_ms) * 1e3 / num_actions}

    report(judge("outside", case, samples, baseline="pykern, step", figures=figures))


def _pipeline(task: Task) -> pykern.Pipeline:
    """All stages on one worker, in GPipe's order."""
    plan = schedules.breadth_first(1, task.num_microbatches, _NUM_STAGES)
    return pykern.Pipeline(task.fresh(), devices="cpu:1", schedule=plan, loss_fn=task.loss_fn)


def _within(task: Task) -> Contender:
    pipe = _pipeline(task)

    def step() -> Tensor:
        return pipe.step(task.inputs, target=task.target)

    return in_this_process("pykern, step", pipe, 1, step)


def _outside(task: Task) -> Contender:
    pipe = _pipeline(task)

    def step() -> Tensor:
        loss = task.loss_fn(pipe(task.inputs), task.target)
        loss.backward()
        return loss.detach()

    return in_this_process("pykern, loss outside", pipe, 1, step)
