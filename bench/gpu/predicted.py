"""Steps of a GPT on groups of multiprocessors, predicted from the times of another schedule's."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

import pykern
from pykern.models import next_token_loss
from pykern.plan import Costs, Plan, simulate
from pykern.schedules import gpipe, one_f_one_b, zb_h1

from .frame import Json
from .gpt_work import GptWork
from .variants import FOURS, WARM_UP, Capture, finish, pipeline

STEPS = 5
ROWS = 2  # of a microbatch
# By a schedule whose traced step tells what actions take, the schedules that are predicted. Splits
# of the backward take times of their own.
PREDICTED = {
    "1f1b": (
        one_f_one_b(4, 8),
        {
            "1f1b, M=8": one_f_one_b(4, 8),
            "1f1b, M=4": one_f_one_b(4, 4),
            "1f1b, M=16": one_f_one_b(4, 16),
            "gpipe, M=4": gpipe(4, 4),
            "gpipe, M=8": gpipe(4, 8),
            "gpipe, M=16": gpipe(4, 16),
        },
    ),
    "zb_h1": (
        zb_h1(4, 8),
        {"zb_h1, M=4": zb_h1(4, 4), "zb_h1, M=8": zb_h1(4, 8), "zb_h1, M=16": zb_h1(4, 16)},
    ),
}


def run(folder: Path) -> Json:
    torch.set_float32_matmul_precision("high")
    work = GptWork(blocks=8, width=1024, context=512)
    return {name: measure(work, capture) for name, capture in (("called", False), ("graph", True))}


def control() -> bool:
    """Times of half the actual ones."""
    work = GptWork(blocks=4, width=256, context=64)
    plan = one_f_one_b(4, 4)
    traced, costs = steps(work, plan, capture=True)
    return bool(traced["traced_ms"] > 1.5 * predicted_ms(plan, costs) / 2)


def measure(work: GptWork, capture: Capture) -> Json:
    found = {}
    for told_by, plans in PREDICTED.values():
        _, costs = steps(work, told_by, capture)
        for name, plan in plans.items():
            times, _ = steps(work, plan, capture)
            found[name] = {"predicted_ms": predicted_ms(plan, costs), **times}
    return found


def predicted_ms(plan: Plan, costs: Costs) -> float:
    return simulate(plan, costs).makespan_ns / 1e6


def steps(work: GptWork, plan: Plan, capture: Capture) -> tuple[Json, Costs]:
    """The median times of steps by the host's clock, and traced by the GPU's; the last's costs."""
    model, (inputs, target) = work.model(), work.batch(ROWS * plan.num_microbatches)
    devices = FOURS["groups"]
    with pipeline(model, plan, devices, capture, next_token_loss, "parameters") as pipe:
        for _ in range(WARM_UP):
            pipe.step(inputs, target=target)
        step_ms = [_step_ms(pipe, inputs, target) for _ in range(STEPS)]
        traced_ms = []
        for _ in range(STEPS):
            with pipe.tracing():
                pipe.step(inputs, target=target)
            traced_ms.append(pipe.timeline().makespan_ns / 1e6)
        times = {"step_ms": statistics.median(step_ms), "traced_ms": statistics.median(traced_ms)}
        return times, pipe.costs()


def _step_ms(pipe: pykern.Pipeline, inputs: torch.Tensor, target: torch.Tensor) -> float:
    finish()
    start = time.perf_counter_ns()
    pipe.step(inputs, target=target)
    finish()
    return (time.perf_counter_ns() - start) / 1e6
