"""The overheads of a step, measured with layers that do next to nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn

from ..pipeline.pipeline import Pipeline
from ..plan import Kind, Plan
from ..plan.costs import by_stage
from ..schedules import by_name
from .by_unit import by_unit, even_spans
from .gaps import gaps

_NUM_UNITS = 16
_ROUNDS = 12
_WARMUPS = 3


@dataclass(frozen=True)
class Overheads:
    """The time that steps take beside their layers, in nanoseconds.

    Attributes:
        half_ns: the time that an I or a W takes beside its layers.
        issue_ns: the time between two actions of a device.
        step_ns: the time of a step before its first action and after its last.
        setup_ns: the part of step_ns that every action adds.
    """

    half_ns: float
    issue_ns: float
    step_ns: float
    setup_ns: float


@dataclass(frozen=True)
class _Steps:
    """Medians over steps of one plan: all microbatches' time by kind, and the time between."""

    num_actions: int
    kinds: Mapping[str, float]
    issue_ns: float
    outside_ns: float


def overheads(devices: Sequence[str]) -> Overheads:
    """Measures devices, given by name, with the same layers, in a stage each and in few stages."""
    plan = by_name["one_f_one_b"](len(devices), 2 * len(devices))
    fine = _steps(by_unit(plan, even_spans(_NUM_UNITS, len(devices))), devices)
    coarse = _steps(plan, devices)
    slope = (fine.outside_ns - coarse.outside_ns) / (fine.num_actions - coarse.num_actions)
    setup_ns = max(slope, 0.0)
    step_ns = max(coarse.outside_ns - setup_ns * coarse.num_actions, 0.0)
    return Overheads(_half_ns(devices), coarse.issue_ns, step_ns, setup_ns)


def handover_ns() -> float:
    """The time from an action to one on another CPU worker that has nothing else to do, in ns.

    The layers take about a millisecond. A worker that waits for so long sleeps and must be woken;
    an action that takes microseconds would stay on the thread of the one before it.
    """
    layers = [nn.Linear(512, 512) for _ in range(2)]
    handed: list[float] = []
    with Pipeline(
        nn.Sequential(*layers),
        devices="cpu:2",
        schedule="one_f_one_b",
        microbatches=2,
        loss_fn=torch.sum,
    ) as pipe:
        for number in range(_WARMUPS + _ROUNDS):
            pipe.step(torch.ones(128, 512))
            if number >= _WARMUPS:
                handed += gaps(pipe.plan, pipe.timeline())[1]
    return median(handed)


def _half_ns(devices: Sequence[str]) -> float:
    """The mean of I and W, as a first stage does all in its W."""
    # On one worker, so that none waits for another's interpreter lock.
    plan = by_name["zb_h1"](1, 2)
    fine, coarse = (_steps(of, devices) for of in (by_unit(plan, [range(_NUM_UNITS)]), plan))
    apart = sum(fine.kinds[kind] - coarse.kinds[kind] for kind in "IW")
    return max(apart / 2 / (_NUM_UNITS - 1), 0.0)


def _steps(plan: Plan, devices: Sequence[str]) -> _Steps:
    layers = [nn.Linear(1, 1) for _ in range(_NUM_UNITS)]
    issued, outside, costs = [0.0], [], []
    with Pipeline(
        nn.Sequential(*layers),
        devices=devices[: plan.num_devices],
        schedule=plan,
        loss_fn=torch.sum,
        balance=[len(span) for span in even_spans(_NUM_UNITS, plan.num_stages)],
    ) as pipe:
        for number in range(_WARMUPS + _ROUNDS):
            start = time.perf_counter_ns()
            with pipe.tracing():
                pipe.step(torch.ones(plan.num_microbatches, 1)).item()
            took = time.perf_counter_ns() - start
            if number >= _WARMUPS:
                timeline = pipe.timeline()
                issued += gaps(plan, timeline)[0]
                outside.append(took - timeline.makespan_ns)
                costs.append(pipe.costs())
    kinds = {}
    for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        times = (by_stage(one, kind, plan.num_stages) for one in costs)
        kinds[kind.name] = sum(map(median, zip(*times, strict=True)))
    return _Steps(plan.num_actions, kinds, median(issued), median(outside))
