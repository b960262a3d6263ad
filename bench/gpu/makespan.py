"""Measured makespans of pipelines of calibrated stages, against the simulator."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pykern
from pykern.plan import Costs, Plan, simulate
from pykern.plan.drawing import save_chrome_trace
from pykern.schedules import gpipe, hanayo, interleaved, one_f_one_b

from .frame import Json
from .spin import Sleep, Spin, Times, calibrated, measured_costs
from .tools import DEVICE
from .variants import FOURS, WARM_UP, Capture, finish, of_each, pipeline

NUM_MICROBATCHES = 8
TIMES = Times(forward_us=2000, input_us=2000, weight_us=2000)
PLANS = {
    "gpipe": gpipe(4, NUM_MICROBATCHES),
    "1f1b": one_f_one_b(4, NUM_MICROBATCHES),
    "interleaved": interleaved(4, NUM_MICROBATCHES, 2),
    "hanayo W=1": hanayo(4, NUM_MICROBATCHES, 1),
    "hanayo W=2": hanayo(4, NUM_MICROBATCHES, 2),
}


def run(folder: Path) -> Json:
    sleep = calibrated()
    x = torch.zeros(NUM_MICROBATCHES, 64, device=DEVICE)
    costs = measured_costs(sleep, TIMES, x[:1])
    figures = measure(sleep, costs, x)
    for name, plan in PLANS.items():
        draw(plan, sleep, costs, x, folder / f"makespan-{name}.trace.json")
    return {
        "costs_ns": {"forward": costs.forward_ns, "backward": costs.backward_ns},
        "by_plan": figures,
    }


def control() -> bool:
    """Stages that take twice as long as the simulator is told."""
    sleep = calibrated()
    x = torch.zeros(NUM_MICROBATCHES, 64, device=DEVICE)
    half = Times(*(us / 2 for us in (TIMES.forward_us, TIMES.input_us, TIMES.weight_us)))
    return are_slow(sleep, measured_costs(sleep, half, x[:1]), x)


def are_slow(sleep: Sleep, costs: Costs, x: Tensor) -> bool:
    """Whether stages take far longer than these costs."""
    plan = PLANS["1f1b"]
    found = against(plan, FOURS["streams"], sleep, x, capture=False)
    return found["traced_ms"] > 1.5 * simulate(plan, costs).makespan_ns / 1e6


def measure(sleep: Sleep, costs: Costs, x: Tensor) -> Json:
    found = {}
    for name, plan in PLANS.items():
        simulated = simulate(plan, costs)
        found[name] = {
            "simulated_ms": simulated.makespan_ns / 1e6,
            "simulated_bubble_ratio": simulated.bubble_ratio,
            **{
                devices_name: of_each(partial(against, plan, devices, sleep, x))
                for devices_name, devices in FOURS.items()
            },
        }
    return found


def draw(plan: Plan, sleep: Sleep, costs: Costs, x: Tensor, path: Path) -> None:
    """Keeps a step by graphs beside the simulated one, to see what came late."""
    with of_spins(plan, FOURS["streams"], sleep, True) as pipe:
        for _ in range(WARM_UP):
            pipe.step(x)
        with pipe.tracing():
            pipe.step(x)
        simulated = simulate(plan, costs)
        timelines = {"simulated": simulated, "measured": pipe.timeline(), "copies": pipe.copies()}
    save_chrome_trace(timelines, path)


def of_spins(plan: Plan, devices: Any, sleep: Sleep, capture: Capture) -> pykern.Pipeline:
    model = nn.Sequential(*(Spin(sleep, TIMES) for _ in range(plan.num_stages)))
    return pipeline(model, plan, devices, capture, Tensor.sum)


def against(plan: Plan, devices: Any, sleep: Sleep, x: Tensor, capture: Capture) -> Json:
    """The makespan by the trace, and of the whole step by the host's clock.

    The least of three, since anything else on the machine only adds.
    """
    with of_spins(plan, devices, sleep, capture) as pipe:
        for _ in range(WARM_UP):
            pipe.step(x)
        finish()
        steps_ns, traced_ns = [], []
        for _ in range(3):
            start = time.perf_counter_ns()
            pipe.step(x)
            finish()
            steps_ns.append(time.perf_counter_ns() - start)
        found = {"step_ms": min(steps_ns) / 1e6}
        if capture == "step":  # a step that is traced is not one graph
            return found
        for _ in range(3):
            with pipe.tracing():
                pipe.step(x)
            traced_ns.append(pipe.timeline().makespan_ns)
        return found | {
            "traced_ms": min(traced_ns) / 1e6,
            "bubble_ratio": pipe.timeline().bubble_ratio,
        }
