"""How much of the copies between stages passes while the lanes at their ends compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pykern import _C
from pykern.plan import Action, Kind, Placement, Span, Timeline
from pykern.schedules import one_f_one_b

from .frame import Json
from .spin import Sleep, Spin, Times, calibrated
from .tools import DEVICE
from .variants import FOURS, WARM_UP, Capture, of_each, pipeline

NUM_MICROBATCHES = 8
PLAN = one_f_one_b(4, NUM_MICROBATCHES)
TIMES = Times(forward_us=500, input_us=500, weight_us=500)
# Numbers of one row, which is one microbatch: 64 MiB, as a batch of long sequences has.
NUM_FLOATS = 1 << 24

Interval = tuple[float, float]


def run(folder: Path) -> Json:
    return measure(calibrated(), torch.zeros(NUM_MICROBATCHES, NUM_FLOATS, device=DEVICE))


def control() -> bool:
    """A copy that is over before anything computes."""
    action, copy = (Action(kind, 0, 0) for kind in (Kind.F, Kind.COPY_F))
    actions, copies = Timeline([[Span(action, 5, 9)], []]), Timeline([[Span(copy, 0, 5)]])
    found = figures(Placement.linear(2), actions, copies)
    return found["share_while_sender_or_receiver_computes"] == 0


def measure(sleep: Sleep, x: Tensor) -> Json:
    return {
        "message_bytes": x[0].numel() * x.element_size(),
        **{name: of_each(partial(overlap, devices, sleep, x)) for name, devices in FOURS.items()},
    }


def overlap(devices: Any, sleep: Sleep, x: Tensor, capture: Capture) -> Json:
    if capture == "step":
        raise ValueError("a step that is traced is not one graph")
    model = nn.Sequential(*(Spin(sleep, TIMES) for _ in range(PLAN.num_stages)))
    with pipeline(model, PLAN, devices, capture, Tensor.mean) as pipe:
        for _ in range(WARM_UP):
            pipe.step(x)
        with pipe.tracing():
            pipe.step(x)
        # The copies have no public name.
        program = pipe._train_program
        assert isinstance(program, _C.StreamProgram)
        actions, copies = pipe.timeline(), program.copies()
    return figures(PLAN.placement, actions, copies)


def figures(placement: Placement, actions: Timeline, copies: Timeline) -> Json:
    """Shares of the copies' time in which sender or receiver compute, and both."""
    busy = [[(span.start_ns, span.end_ns) for span in row] for row in actions.rows]
    total = either = both = 0.0
    for span in (span for row in copies.rows for span in row):
        copy = (span.start_ns, span.end_ns)
        receiver = span.action.stage + (1 if span.action.kind is Kind.COPY_F else -1)
        sides = [busy[placement.device_of(stage)] for stage in (span.action.stage, receiver)]
        shares = [common(copy, intervals) for intervals in sides]
        together = common(copy, [part for a in sides[0] for part in cut(a, sides[1])])
        total += copy[1] - copy[0]
        both += together
        either += sum(shares) - together
    return {
        "copies": sum(len(row) for row in copies.rows),
        "copy_ms": total / 1e6,
        "makespan_ms": actions.makespan_ns / 1e6,
        "share_while_sender_or_receiver_computes": either / total,
        "share_while_both_compute": both / total,
    }


def cut(interval: Interval, others: Iterable[Interval]) -> list[Interval]:
    """The parts of an interval that lie in one of the others, which do not overlap."""
    parts = [(max(interval[0], start), min(interval[1], end)) for start, end in others]
    return [(start, end) for start, end in parts if start < end]


def common(interval: Interval, others: Sequence[Interval]) -> float:
    """How much of an interval lies in one of the others."""
    return sum(end - start for start, end in cut(interval, others))
