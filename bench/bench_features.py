"""Claim: a feature costs an action little more than the same work costs in a hand-written loop.

Stages of one Linear(16, 16) on one worker, in the order of the loop. The loops call the engine of
autograd without the checks of `Tensor.backward`. All figures are of CPU time.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern.plan import Plan
from pykern.runtime.random.seed import action_seed
from pykern.torch_private import WHOLE, run_backward

from .contenders import loop_order
from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge

Report = Callable[[list[Record]], None]
# Runs one microbatch: gets its rows and targets, and a function that gives its loss's gradient.
Through = Callable[[nn.Module, Tensor, Tensor, Tensor, int], Tensor]

WIDTH = 16
NUM_STAGES = 3
NUM_SEGMENTS = 30


def linears(count: int = NUM_STAGES) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def with_dropout() -> nn.Sequential:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)) for _ in range(NUM_STAGES)]
    return nn.Sequential(*layers)


class Skips(nn.Module):
    """The last block reads a value of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears()

    def forward(self, x: Tensor) -> Tensor:
        first, middle, last = self.blocks
        y: Tensor = first(x)
        kept = torch.sin(y)
        return torch.add(last(middle(y)), kept)


class Recorded(nn.Module):
    """Its forward is not a chain of modules, so it is recorded, and each block is a segment."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = linears(NUM_SEGMENTS)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def plain(model: nn.Module, x: Tensor, y: Tensor, share: Tensor, _: int) -> Tensor:
    """One stage after another and back; without stages, the model as a whole."""
    stages = list(model) if isinstance(model, nn.Sequential) else [model]
    return _back(stages, x, y, share, lambda stage: None)


def drawing(model: nn.Module, x: Tensor, y: Tensor, share: Tensor, microbatch: int) -> Tensor:
    """The same, with the random numbers that each stage of each microbatch draws in pykern."""
    assert isinstance(model, nn.Sequential)
    return _back(list(model), x, y, share, _seeds(microbatch))


def _seeds(microbatch: int) -> Callable[[int], None]:
    step_seed = torch.initial_seed()

    def seed(stage: int) -> None:
        torch.default_generator.manual_seed(action_seed(step_seed, stage, microbatch))

    return seed


def _back(
    stages: list[nn.Module], x: Tensor, y: Tensor, share: Tensor, before: Callable[[int], None]
) -> Tensor:
    inputs = [x]
    outputs: list[Tensor] = []
    for number, stage in enumerate(stages):
        if number > 0:
            inputs.append(outputs[-1].detach().requires_grad_())
        before(number)
        outputs.append(stage(inputs[-1]))
    loss = F.mse_loss(outputs[-1], y)
    run_backward((loss,), (share,), *WHOLE)
    for given, output in zip(inputs[:0:-1], outputs[-2::-1], strict=True):
        run_backward((output,), (given.grad,), *WHOLE)
    return loss.detach()


def recomputed(model: nn.Module, x: Tensor, y: Tensor, share: Tensor, _: int) -> Tensor:
    """Keeps the inputs of stages, and calls each but the last once more before its backward."""
    return _again(model, x, y, share, lambda stage: None)


def drawing_again(model: nn.Module, x: Tensor, y: Tensor, share: Tensor, microbatch: int) -> Tensor:
    """The same, with the random numbers of `drawing`."""
    return _again(model, x, y, share, _seeds(microbatch))


def _again(
    model: nn.Module, x: Tensor, y: Tensor, share: Tensor, before: Callable[[int], None]
) -> Tensor:
    assert isinstance(model, nn.Sequential)
    *stages, last = model
    inputs = [x]
    for number, stage in enumerate(stages):
        before(number)
        inputs.append(stage(inputs[-1]).detach().requires_grad_())
    before(len(stages))
    loss = F.mse_loss(last(inputs[-1]), y)
    run_backward((loss,), (share,), *WHOLE)
    for number in reversed(range(len(stages))):
        before(number)
        output = stages[number](inputs[number])
        run_backward((output,), (inputs[number + 1].grad,), *WHOLE)
    return loss.detach()


def skipping(model: nn.Module, x: Tensor, y: Tensor, share: Tensor, _: int) -> Tensor:
    """Hands the skipped value over beside the others."""
    assert isinstance(model, Skips)
    first, middle, last = model.blocks
    near = first(x)
    kept = torch.sin(near)
    leaf, kept_leaf = (value.detach().requires_grad_() for value in (near, kept))
    far = middle(leaf)
    far_leaf = far.detach().requires_grad_()
    loss = F.mse_loss(torch.add(last(far_leaf), kept_leaf), y)
    run_backward((loss,), (share,), *WHOLE)
    run_backward((far,), (far_leaf.grad,), *WHOLE)
    run_backward((near, kept), (leaf.grad, kept_leaf.grad), *WHOLE)
    return loss.detach()


def skipping_again(model: nn.Module, x: Tensor, y: Tensor, share: Tensor, _: int) -> Tensor:
    """The same, and calls the first two blocks once more before their backwards."""
    assert isinstance(model, Skips)
    first, middle, last = model.blocks
    near = first(x)
    leaf, kept_leaf = (value.detach().requires_grad_() for value in (near, torch.sin(near)))
    far_leaf = middle(leaf).detach().requires_grad_()
    loss = F.mse_loss(torch.add(last(far_leaf), kept_leaf), y)
    run_backward((loss,), (share,), *WHOLE)
    run_backward((middle(leaf),), (far_leaf.grad,), *WHOLE)
    near = first(x)
    run_backward((near, torch.sin(near)), (leaf.grad, kept_leaf.grad), *WHOLE)
    return loss.detach()


CASES: dict[str, tuple[Callable[[], nn.Module], Through, int, dict[str, Any]]] = {
    "plain": (linears, plain, NUM_STAGES, {}),
    "recompute": (linears, recomputed, NUM_STAGES, {"recompute": "stage"}),
    "dropout": (with_dropout, drawing, NUM_STAGES, {}),
    "skips": (Skips, skipping, NUM_STAGES, {"sample": torch.ones(4, WIDTH)}),
    "dropout, recompute": (with_dropout, drawing_again, NUM_STAGES, {"recompute": "stage"}),
    "skips, recompute": (
        Skips,
        skipping_again,
        NUM_STAGES,
        {"sample": torch.ones(4, WIDTH), "recompute": "stage"},
    ),
    "recorded": (Recorded, plain, 1, {"sample": torch.ones(4, WIDTH)}),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_feature(name: str, benchmark: BenchmarkFixture, smoke: bool, report: Report) -> None:
    """Cost per action beyond the loop; of the recorded model, per segment and direction."""
    num_microbatches = 4 if smoke else 64
    make, through, num_stages, options = CASES[name]
    torch.manual_seed(0)
    model = make()
    batch = torch.randn(2, 4 * num_microbatches, WIDTH)
    contenders = [
        in_a_loop(model, batch, num_microbatches, through),
        in_pykern(model, batch, loop_order(num_stages, num_microbatches), options),
    ]
    # The loop cannot know the seed of the step.
    if "dropout" not in name:
        assert_same_answer(contenders)
    rounds, in_a_row = (1, 1) if smoke else (30, 10)
    clock = time.process_time_ns
    samples = interleave(benchmark, contenders, rounds, clock=clock, in_a_row=in_a_row)
    if smoke:
        return
    num_actions = num_microbatches * actions_of_a_microbatch(name)

    def figures(median_ms: float, hand_ms: float) -> dict[str, float]:
        return {
            "us per action": median_ms * 1e3 / num_actions,
            "us beyond": (median_ms - hand_ms) * 1e3 / num_actions,
        }

    case = f"{name}, microbatches {num_microbatches} x 4 rows, CPU time"
    report(judge("features", case, samples, baseline="engine loop", figures=figures))


def actions_of_a_microbatch(name: str) -> int:
    """The actions of a microbatch; a segment of a recorded model counts as two."""
    num_stages = CASES[name][2]
    if name == "recorded":
        return 2 * NUM_SEGMENTS
    # The last stage has no R.
    return 3 * num_stages - 1 if "recompute" in name else 2 * num_stages


def in_a_loop(
    model: nn.Module, batch: Tensor, num_microbatches: int, through: Through
) -> Contender:
    own = copy.deepcopy(model)
    share = torch.tensor(1 / num_microbatches)

    def step() -> Tensor:
        x, y = (tensor.chunk(num_microbatches) for tensor in batch)
        total = torch.zeros(())
        for microbatch, (value, target) in enumerate(zip(x, y, strict=True)):
            total += through(own, value, target, share, microbatch)
        return total * share

    return in_this_process("engine loop", own, 1, step)


def in_pykern(model: nn.Module, batch: Tensor, plan: Plan, options: dict[str, Any]) -> Contender:
    own = copy.deepcopy(model)
    pipe = pykern.Pipeline(own, devices="cpu:1", schedule=plan, loss_fn=F.mse_loss, **options)
    x, y = batch
    return in_this_process("pykern, 1 worker", own, 1, lambda: pipe.step(x, target=y))
