"""Predicted against measured step times, for random configurations on CPU workers.

    python -m bench.predicted --out predicted.jsonl     # 15 on two devices, 15 on four
    python -m bench.predicted --smoke                   # a few tiny ones

The model is measured once for each number of devices. Then a cut, a schedule with its options, and
a number of microbatches and of replicas are drawn, and their steps are run. Where the devices are
more than the cores, the prediction shares the cores. A virtual machine changes its speed from
minute to minute: steps of 1F1B run in turn with those of each configuration, whose time is divided
by how much longer these take than at the time of the measurement.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from pykern import Pipeline
from pykern.models import gpt, next_token_loss
from pykern.pipeline.left_alone import left_alone
from pykern.schedules import one_f_one_b
from pykern.tuning.asked import Asked
from pykern.tuning.by_unit import even_spans
from pykern.tuning.measure import measure
from pykern.tuning.measurements import Measurements
from pykern.tuning.shared_cores import simulate_shared
from pykern.tuning.space import max_chunks_of, plans_of, shares_of

from .tuning import medians

ROUNDS = 9


def asked_of(num_devices: int, *, smoke: bool) -> Asked:
    """A GPT and a batch for it."""
    width, rows, context = (16, 2, 8) if smoke else (128, 16, 64)
    model = gpt(layers=4, width=width, heads=4, context=context, seed=0)
    ids = torch.randint(256, (rows, context + 1), generator=torch.Generator().manual_seed(0))
    inputs, target = ids[:, :-1], ids[:, 1:]
    return Asked(model, inputs, next_token_loss, f"cpu:{num_devices}", target)


class Reference:
    """Steps of 1F1B, which show how fast the machine is."""

    def __init__(self, asked: Asked, pipe: Pipeline) -> None:
        self._pipe, self._batch = pipe, asked.batch(asked.rows)
        self._then: list[float] = []

    def remember(self) -> None:
        """The machine is now as fast as it counts."""
        self._then += medians([self._pipe], self._batch, ROUNDS)

    def beside(self, pipe: Pipeline) -> tuple[float, float]:
        """The median step of a pipeline, and how much slower the machine is by now."""
        now, step = medians([self._pipe, pipe], self._batch, ROUNDS)
        return step, now / statistics.mean(self._then)


def compared(
    asked: Asked, measured: Measurements, draw: random.Random, reference: Reference
) -> dict[str, Any]:
    """One random configuration: its predicted and its median measured step."""
    num_units = len(asked.units.names)
    shares = draw.choice(
        [
            shares
            for shares in shares_of(asked.num_devices, asked.rows, replicated=True)
            if max_chunks_of(shares, num_units) > 0
        ]
    )
    name, plan = draw.choice(list(plans_of(shares, num_units)))
    bounds = [0, *sorted(draw.sample(range(1, num_units), plan.num_stages - 1)), num_units]
    spans = [range(start, end) for start, end in pairwise(bounds)]
    plan = shares.side_by_side(plan)
    rows = asked.rows / plan.num_microbatches
    costs = measured.costs(spans, rows)
    outside = measured.outside_ns(plan.num_actions, shares.replicas)
    speeds = measured.speeds_for(rows)
    timeline = simulate_shared(plan, costs, speeds, measured.crowded_ns)
    with asked.pipeline(plan, spans) as pipe:
        step, slower = reference.beside(pipe)
    return {
        "devices": asked.num_devices,
        "schedule": name,
        "microbatches": plan.num_microbatches,
        "replicas": shares.replicas,
        "cut": [len(span) for span in spans],
        "predicted_ms": (timeline.makespan_ns + outside) / 1e6,
        "measured_ms": step / slower / 1e6,
        "slower": slower,
    }


def results(count: int, *, smoke: bool, on: Sequence[int] = (2, 4)) -> Iterator[dict[str, Any]]:
    """One for each configuration; as many on each number of devices."""
    for num_devices in on:
        asked = asked_of(num_devices, smoke=smoke)
        draw = random.Random(num_devices)
        plan = one_f_one_b(num_devices, 2 * num_devices)
        spans = even_spans(len(asked.units.names), num_devices)
        with left_alone([asked.model]), asked.pipeline(plan, spans) as pipe:
            reference = Reference(asked, pipe)
            reference.remember()
            measured = measure(asked, lambda _: None)
            reference.remember()
            for _ in range(count // len(on)):
                yield compared(asked, measured, draw, reference)


def error(one: dict[str, Any]) -> float:
    """How far the prediction is off, as a share of what was measured."""
    return abs(one["predicted_ms"] / one["measured_ms"] - 1)


def main() -> None:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="results are written to this file")
    parser.add_argument("--count", type=int, default=30, help="configurations")
    parser.add_argument("--smoke", action="store_true", help="tiny model, four configurations")
    arguments = parser.parse_args()
    found = []
    for one in results(4 if arguments.smoke else arguments.count, smoke=arguments.smoke):
        found.append(one | {"error": error(one)})
        print(json.dumps(found[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text("".join(f"{json.dumps(one)}\n" for one in found), encoding="utf-8")
    errors = [one["error"] for one in found]
    print(f"error: {statistics.median(errors):.1%} in the median, {max(errors):.1%} at worst")


if __name__ == "__main__":
    main()
