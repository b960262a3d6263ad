"""CPU microseconds that an action costs to issue, for stages that hardly compute."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from pykern.schedules import one_f_one_b

from .frame import Json
from .tools import DEVICE
from .variants import FOURS, WARM_UP, Capture, finish, of_each, pipeline, tried

PLAN = one_f_one_b(4, 32)
WIDTH = 16


def run(folder: Path) -> Json:
    figures = measure(DEVICE, rounds=40)
    (folder / "action_cpu.profile.txt").write_text(profiled(DEVICE))
    return figures


def control() -> bool:
    """A step that keeps the CPU busy for 10 ms."""

    def busy() -> None:
        end = time.thread_time_ns() + 10_000_000
        while time.thread_time_ns() < end:
            pass

    num_actions = sum(len(row) for row in PLAN.rows)
    return us_per_action(busy, rounds=3)[0] >= 10_000 / num_actions - 1


def measure(device: torch.device, rounds: int) -> Json:
    return {
        "actions": sum(len(row) for row in PLAN.rows),
        "plain loop": {"us_per_action": plain_us(device, rounds)},
        **of_each(lambda capture: issued(capture, device, rounds)),
        "threads": tried(lambda: by_threads(device, rounds)),
    }


def plain_us(device: torch.device, rounds: int) -> float:
    """Time of the unpipelined model, by microbatch, shared out over the same actions."""
    model, x, y = task(device)
    model.to(device)
    parts = list(zip(x.chunk(PLAN.num_microbatches), y.chunk(PLAN.num_microbatches), strict=True))

    def step() -> None:
        for part, target in parts:
            F.mse_loss(model(part), target).backward()

    return us_per_action(step, rounds)[0]


def issued(capture: Capture, device: torch.device, rounds: int) -> Json:
    model, x, y = task(device)
    with pipeline(model, PLAN, FOURS["streams"], capture, F.mse_loss) as pipe:
        for _ in range(WARM_UP):
            pipe.step(x, target=y)
        cpu_us, wall_us = us_per_action(lambda: pipe.step(x, target=y), rounds)
    return {"us_per_action": cpu_us, "wall_us_per_action": wall_us}


def profiled(device: torch.device, num_steps: int = 10) -> str:
    """The functions that take most of called steps, by Python's profiler, which slows all."""
    model, x, y = task(device)
    profile = cProfile.Profile()
    with pipeline(model, PLAN, FOURS["streams"], False, F.mse_loss) as pipe:
        for _ in range(WARM_UP):
            pipe.step(x, target=y)
        for _ in range(num_steps):
            finish()
            profile.runcall(pipe.step, x, target=y)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(50)
    return text.getvalue()


def by_threads(device: torch.device, rounds: int) -> Json:
    """The wall time alone: the calling thread waits for those that issue."""
    model, x, y = task(device)
    with pipeline(model, PLAN, FOURS["streams"], False, F.mse_loss, issue="threads") as pipe:
        for _ in range(WARM_UP):
            pipe.step(x, target=y)
        _, wall_us = us_per_action(lambda: pipe.step(x, target=y), rounds)
    return {"wall_us_per_action": wall_us}


def us_per_action(step: Callable[[], object], rounds: int) -> tuple[float, float]:
    """CPU time of this thread and wall time until the step is issued, not done; medians."""
    cpu_ns, wall_ns = [], []
    for _ in range(rounds):
        finish()
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        step()
        cpu_ns.append(time.thread_time_ns() - cpu)
        wall_ns.append(time.perf_counter_ns() - wall)
    num_actions = sum(len(row) for row in PLAN.rows)
    cpu_us, wall_us = (
        round(statistics.median(ns) / num_actions / 1e3, 3) for ns in (cpu_ns, wall_ns)
    )
    return cpu_us, wall_us


def task(device: torch.device) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    torch.autograd.set_multithreading_enabled(False)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(PLAN.num_stages)))
    x, y = torch.randn(2, 4 * PLAN.num_microbatches, WIDTH, device=device)
    return model, x, y
