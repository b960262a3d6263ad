"""Contenders on the GPU: made where they can be, compared with the first, then timed in turn."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.contenders import Task, plain
from bench.harness import Contender, PlainRounds, assert_same_answer, interleave, judge
from pykern.plan import Plan

from .frame import Json
from .variants import CAPTURES, FOURS, WARM_UP, Capture, pipeline

Make = Callable[[], Contender]
# For a contender to be made, warmed up and compared: torchgpipe's first steps on an H100 took more
# than was left of a minute.
READY_S = 25


def side_by_side(claim: str, makers: Mapping[str, Make], rounds: int, tolerance: float) -> Json:
    """Step times beside the first contender's; of one that is absent or wrong, the error."""
    errors: dict[str, str] = {}
    there: list[Contender] = []
    for name, make in makers.items():
        try:
            with no_longer_than(READY_S):
                contender = make()
                if there:
                    assert_same_answer([there[0], contender], tolerance)
        except ImportError as absent:
            errors[name] = f"absent: {absent}"
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"[:500]
        else:
            there.append(contender)
        # As they come, since one that hangs takes the figures of all along.
        print(name, errors.get(name, "is ready"), flush=True)
    if not there:
        raise RuntimeError(f"no contender of {claim} runs: {errors}")
    samples = interleave(PlainRounds(), there, rounds)
    records = judge(claim, claim, samples, there[0].name, lambda *_: {}) if rounds > 1 else []
    return {
        "ran": [contender.name for contender in there],
        "records": [asdict(record) for record in records],
        "errors": errors,
    }


@contextmanager
def no_longer_than(limit_s: int) -> Iterator[None]:
    """Raises TimeoutError in the main thread, also where Python waits for another thread."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it took longer than {limit_s} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def notices_wrong_gradients(device: torch.device) -> bool:
    """Whether a contender with twice the gradients is an error."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4)), torch.ones(4, 4, device=device)
    task = Task(model, x, x + 1, 2, torch.nn.functional.mse_loss)

    def twice() -> Contender:
        right = plain(task)
        return replace(
            right, gradients=lambda: {name: 2 * g for name, g in right.gradients().items()}
        )

    found = side_by_side("control", {"plain": partial(plain, task), "twice": twice}, 1, 1e-2)
    return "twice" in found["errors"] and found["ran"] == ["plain loop"]


def of_each_way(task: Task, plan: Plan) -> dict[str, Make]:
    """A pipeline for each way to run a step: by the caller, by threads, and by graphs."""
    by_caller = {
        name: partial(of_pykern, f"pykern {name}", task, plan, capture)
        for name, capture in CAPTURES.items()
    }
    threads = partial(of_pykern, "pykern threads", task, plan, False, issue="threads")
    return {**by_caller, "threads": threads}


def of_pykern(name: str, task: Task, plan: Plan, capture: Capture, **options: Any) -> Contender:
    """A pipeline of four devices on one GPU, warm."""
    model = task.fresh()
    pipe = pipeline(model, plan, FOURS["streams"], capture, task.loss_fn, "parameters", **options)

    def step() -> float:
        return pipe.step(task.inputs, target=task.target).item()

    for _ in range(WARM_UP):
        step()
    return Contender(name, step, lambda: gradients(model), lambda: clear(model))


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def clear(model: torch.nn.Module) -> None:
    """In place: graphs add to the gradients that were there when they were captured."""
    model.zero_grad(set_to_none=False)
