"""Claim: stages cut by the speeds of their devices beat equal ones, and are near the bound.

Three workers whose layers sleep, on the last twice as long, under 1F1B. Equal stages are the
baseline. The bound is `pykern.partition.unequal.bound_of`, for all cuts and orders, with the times
of actions as measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern.partition.unequal import bound_of

from .asleep import Asleep
from .harness import Record, assert_same_answer, in_this_process, interleave, judge

_SPEEDS = (1.0, 1.0, 0.5)
_FORWARD_S = 0.5e-3

Report = Callable[[list[Record]], None]


class _Sleeper(nn.Module):
    """A layer that takes as long as its device's speed makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.seconds = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return Asleep.apply(x * self.scale, self.seconds)


def _pipeline(num_layers: int, microbatches: int, devices: list[Any]) -> pykern.Pipeline:
    pipe = pykern.Pipeline(
        [_Sleeper() for _ in range(num_layers)],
        devices=devices,
        microbatches=microbatches,
        loss_fn=F.mse_loss,
        balance="layers",
    )
    layers = list(pipe.children())
    for stage, device in zip(pipe.partition.stages, pipe.plan.placement.replicas[0], strict=True):
        for layer in layers[stage.start : stage.stop]:
            assert isinstance(layer, _Sleeper)
            layer.seconds = _FORWARD_S / _SPEEDS[device]
    return pipe


def _bound_ms(pipe: pykern.Pipeline) -> float:
    """The bound for the work of a pipeline's last step, at the speeds of the devices."""
    costs = pipe.costs()
    assert isinstance(costs.forward_ns, list)
    assert isinstance(costs.backward_ns, list)
    pairs = zip(costs.forward_ns, costs.backward_ns, _SPEEDS, strict=True)
    work = sum((forward + backward) * speed for forward, backward, speed in pairs)
    return bound_of(work, pipe.plan, _SPEEDS) / 1e6


@pytest.mark.timeout(600)
def test_speeds(benchmark: BenchmarkFixture, smoke: bool, report: Report) -> None:
    """One stage on each of three workers."""
    num_layers, microbatches = (6, 4) if smoke else (96, 48)
    unequal = [pykern.Device("cpu", speed=speed) for speed in _SPEEDS]
    x = torch.ones(microbatches, 1)
    pipes = {
        "equal stages": _pipeline(num_layers, microbatches, ["cpu"] * 3),
        "by speed": _pipeline(num_layers, microbatches, unequal),
    }
    contenders = [
        in_this_process(name, pipe, 1, partial(pipe.step, x, target=torch.zeros_like(x)))
        for name, pipe in pipes.items()
    ]
    assert_same_answer(contenders)
    samples = interleave(benchmark, contenders, 1 if smoke else 5, settle_s=0.02)
    bound_ms = _bound_ms(pipes["by speed"])
    for pipe in pipes.values():
        pipe.close()
    if smoke:
        return

    def figures(median_ms: float, baseline_ms: float) -> dict[str, float]:
        return {"above the bound": median_ms / bound_ms - 1, "speed-up": baseline_ms / median_ms}

    case = f"{num_layers} sleeping layers, 1F1B of {microbatches} microbatches, speeds 1, 1, 0.5"
    report(judge("unequal", case, samples, "equal stages", figures))
