"""Claim: no runtime that keeps a pipeline in one process dispatches for less than pykern.

torchgpipe and fairscale's Pipe have a thread for each device, and the CPU is one device: so all of
their stages share a thread, and pykern gets one worker here. Both are left out where they are not
installed. Their losses are outside of the pipeline; pykern runs with the loss inside and outside,
in an order like 1F1B's and in GPipe's, as they do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.models import gpt, next_token_loss

from .contenders import Task, fairscale, plain, process_group, torch_runtime, torchgpipe
from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge

_NUM_STAGES = 4


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["tiny", "gpt"])
def test_peers(
    kind: str, benchmark: BenchmarkFixture, smoke: bool, report: Callable[[list[Record]], None]
) -> None:
    """A step of four stages in this process, of layers that hardly compute and of a small GPT."""
    if not smoke and os.environ.get("OMP_NUM_THREADS") != "1":
        pytest.fail("run this with OMP_NUM_THREADS=1: peers compute on threads of their own")
    case, task = _tiny(smoke) if kind == "tiny" else _gpt(smoke)
    with process_group():
        contenders = [plain(task), *_pykern(task), torch_runtime(task, _NUM_STAGES)]
        for older in (torchgpipe, fairscale):
            with suppress(ImportError):
                contenders.append(older(task, _NUM_STAGES))
        assert_same_answer(contenders, tolerance=1e-4)
        rounds = 1 if smoke else 100 if kind == "tiny" else 20
        samples = interleave(benchmark, contenders, rounds)
    if smoke:
        return
    num_actions = 2 * task.num_microbatches * _NUM_STAGES

    def figures(median_ms: float, plain_ms: float) -> dict[str, float]:
        return {"us beyond, per action": (median_ms - plain_ms) * 1e3 / num_actions}

    report(judge("peers", case, samples, baseline="plain loop", figures=figures))


def _pykern(task: Task) -> list[Contender]:
    """All stages on one worker."""

    def within(pipe: pykern.Pipeline) -> Tensor:
        return pipe.step(task.inputs, target=task.target)

    def outside(pipe: pykern.Pipeline) -> Tensor:
        loss = task.loss_fn(pipe(task.inputs), task.target)
        loss.backward()
        return loss.detach()

    made = []
    for name, schedule, step in (
        ("pykern", schedules.interleaved, within),
        ("pykern, GPipe's order", schedules.breadth_first, within),
        ("pykern, loss outside", schedules.breadth_first, outside),
    ):
        plan = schedule(1, task.num_microbatches, _NUM_STAGES)
        model = task.fresh()
        pipe = pykern.Pipeline(model, devices="cpu:1", schedule=plan, loss_fn=task.loss_fn)
        made.append(in_this_process(name, model, 1, partial(step, pipe)))
    return made


def _tiny(smoke: bool) -> tuple[str, Task]:
    num_microbatches = 4 if smoke else 64
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(_NUM_STAGES)))
    x, y = torch.randn(2, 4 * num_microbatches, 16)
    case = f"4 x Linear(16, 16), microbatches {num_microbatches} x 4 rows"
    return case, Task(model, x, y, num_microbatches, F.mse_loss)


def _gpt(smoke: bool) -> tuple[str, Task]:
    width, context = (16, 8) if smoke else (128, 64)
    model = gpt(layers=4, width=width, heads=4, context=context)
    ids = torch.randint(256, (16, context + 1), generator=torch.Generator().manual_seed(0))
    case = f"GPT of 4 blocks, width {width}, sequence {context}, microbatches 8 x 2 rows"
    return case, Task(model, ids[:, :-1], ids[:, 1:], 8, next_token_loss)
