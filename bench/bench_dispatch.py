"""Claim: running a plan costs little more than the same work in a hand-written loop.

Stages so small that what is left is the cost of dispatching their actions. Baseline: a loop over
microbatches and stages with detached boundaries. A second loop calls the engine of autograd without
the checks of `Tensor.backward`, as pykern does, and a third also keeps the strides of gradients.
Peer: torch's own schedule runtime in one process.
Measured twice: by the wall, and in CPU time, which other work on the machine disturbs less.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.torch_private import WHOLE, run_backward

from . import contenders as other
from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge

Report = Callable[[list[Record]], None]


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    with other.process_group():
        yield


CLOCKS = {"CPU time": time.process_time_ns, "wall time": time.perf_counter_ns}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_dispatch(
    num_stages: int,
    clock: str,
    benchmark: BenchmarkFixture,
    smoke: bool,
    report: Report,
    process_group: None,
) -> None:
    """Cost per action beyond the hand loop, with stages of one Linear(16, 16)."""
    num_microbatches = 4 if smoke else 64
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_stages)))
    batch = torch.randn(2, 4 * num_microbatches, 16)
    x, y = batch
    contenders = [
        hand_loop(chain, batch, num_microbatches),
        hand_loop(chain, batch, num_microbatches, "engine loop"),
        hand_loop(chain, batch, num_microbatches, "engine loop, strides kept"),
        in_pykern(chain, batch, num_microbatches, num_workers=1, in_loop_order=True),
        other.torch_runtime(other.Task(chain, x, y, num_microbatches, F.mse_loss), num_stages),
    ]
    if num_stages > 1:
        contenders[4:4] = [
            in_pykern(chain, batch, num_microbatches, num_workers=1),
            in_pykern(chain, batch, num_microbatches, num_workers=num_stages),
        ]
    assert_same_answer(contenders)
    rounds, in_a_row = (1, 1) if smoke else (40, 10)
    samples = interleave(benchmark, contenders, rounds, clock=CLOCKS[clock], in_a_row=in_a_row)
    if smoke:
        return
    num_actions = 2 * num_microbatches * num_stages

    def figures(median_ms: float, hand_ms: float) -> dict[str, float]:
        return {
            "us per action": median_ms * 1e3 / num_actions,
            "us beyond": (median_ms - hand_ms) * 1e3 / num_actions,
        }

    case = f"{num_stages} x Linear(16, 16), microbatches {num_microbatches} x 4 rows, {clock}"
    report(judge("dispatch", case, samples, baseline="hand loop", figures=figures))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [16, 32, 64, 96, 128, 192, 256, 512])
def test_crossover(width: int, benchmark: BenchmarkFixture, smoke: bool, report: Report) -> None:
    """From which cost of an action two workers are faster than one thread."""
    num_microbatches = 2 if smoke else 16
    torch.manual_seed(0)
    chain = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)) for _ in range(2))
    )
    batch = torch.randn(2, 32 * num_microbatches, width)
    contenders = [
        hand_loop(chain, batch, num_microbatches),
        in_pykern(chain, batch, num_microbatches, num_workers=1),
        in_pykern(chain, batch, num_microbatches, num_workers=2),
    ]
    assert_same_answer(contenders)
    samples = interleave(benchmark, contenders, rounds=1 if smoke else 60)
    if smoke:
        return

    def figures(median_ms: float, hand_ms: float) -> dict[str, float]:
        return {
            "us per action": median_ms * 1e3 / (4 * num_microbatches),
            "speed-up": hand_ms / median_ms,
        }

    case = f"2 stages of 2 x Linear({width}, {width}), microbatches {num_microbatches} x 32 rows"
    report(judge("crossover", case, samples, baseline="hand loop", figures=figures))


def hand_loop(
    model: nn.Sequential, batch: Tensor, num_microbatches: int, name: str = "hand loop"
) -> Contender:
    """The loop that one would write to run these stages microbatch by microbatch, and fast.

    "engine loop" calls the engine without torch's checks. "engine loop, strides kept" also hands a
    gradient over as the backward has computed it, as pykern does: `.grad` has the strides of its
    leaf, so that sums over it may round otherwise than in the model without a cut.
    """
    chain = copy.deepcopy(model)
    stages = list(chain)
    share = torch.tensor(1 / num_microbatches)
    keeps_strides = name.endswith("kept")

    def backward(output: Tensor, gradient: Tensor | None) -> None:
        if name == "hand loop":
            output.backward(gradient)
        else:
            run_backward((output,), (gradient,), *WHOLE)

    def gradient_of(stage_input: Tensor, output: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The gradient of a stage's input, after the backward of the stage."""
        if not (keeps_strides and stage_input.requires_grad):
            backward(output, gradient)
            return stage_input.grad
        come: list[Tensor] = []
        hook = stage_input.register_hook(come.append)
        backward(output, gradient)
        hook.remove()
        return come[0]

    def step() -> Tensor:
        x, y = (tensor.chunk(num_microbatches) for tensor in batch)
        total = torch.zeros(())
        for value, target in zip(x, y, strict=True):
            inputs, outputs = [value], [stages[0](value)]
            for stage in stages[1:]:
                inputs.append(outputs[-1].detach().requires_grad_())
                outputs.append(stage(inputs[-1]))
            loss = F.mse_loss(outputs[-1], target)
            gradient: Tensor | None = share
            outputs[-1] = loss
            for stage_input, output in zip(reversed(inputs), reversed(outputs), strict=True):
                gradient = gradient_of(stage_input, output, gradient)
            total += loss.detach()
        return total * share

    return in_this_process(name, chain, 1, step)


def in_pykern(
    model: nn.Sequential,
    batch: Tensor,
    num_microbatches: int,
    num_workers: int,
    *,
    in_loop_order: bool = False,
) -> Contender:
    """All stages on one worker, also in the order of the loop, or a worker for each."""
    chain = copy.deepcopy(model)
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    if in_loop_order:
        plan = other.loop_order(len(chain), num_microbatches)
        workers = "1 worker, the loop's order"
    elif num_workers == len(chain):
        plan = schedules.one_f_one_b(num_workers, num_microbatches)
    else:
        plan = schedules.interleaved(num_workers, num_microbatches, len(chain) // num_workers)
    pipe = pykern.Pipeline(
        chain, devices=f"cpu:{num_workers}", schedule=plan, loss_fn=F.mse_loss, balance="layers"
    )
    x, y = batch
    return in_this_process(f"pykern, {workers}", chain, 1, lambda: pipe.step(x, target=y))
