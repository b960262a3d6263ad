"""Predicted against measured step times, for random configurations on CPU workers.

    python -m bench.predicted --out predicted.jsonl     # 15 on two devices, 15 on four
    python -m bench.predicted --smoke                   # a few tiny ones

A cut, a schedule with its options, and a number of microbatches and of replicas are drawn for each
configuration. Where the devices are more than the cores, the prediction shares the cores. A virtual
machine changes its speed from minute to minute: the model is measured and steps of all
configurations run, in turn, a few times, and the medians are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pykern.models import gpt, next_token_loss
from pykern.pipeline.left_alone import left_alone
from pykern.plan import Plan
from pykern.tuning.asked import Asked
from pykern.tuning.measure import measure
from pykern.tuning.measurements import Measurements
from pykern.tuning.shared_cores import simulate_shared
from pykern.tuning.space import max_chunks_of, plans_of, shares_of

from .tuning import medians

TURNS, ROUNDS = 9, 3


def asked_of(num_devices: int, *, smoke: bool) -> Asked:
    """A GPT and a batch for it."""
    width, rows, context = (16, 2, 8) if smoke else (128, 16, 64)
    model = gpt(layers=4, width=width, heads=4, context=context, seed=0)
    ids = torch.randint(256, (rows, context + 1), generator=torch.Generator().manual_seed(0))
    inputs, target = ids[:, :-1], ids[:, 1:]
    return Asked(model, inputs, next_token_loss, f"cpu:{num_devices}", target)


class Drawn(NamedTuple):
    """A random configuration.

    Attributes:
        schedule: the name of the schedule, with its options.
        plan: the plan of all replicas.
        spans: the units of each stage.
        replicas: the number of replicas.
    """

    schedule: str
    plan: Plan
    spans: list[range]
    replicas: int


def drawn(asked: Asked, draw: random.Random) -> Drawn:
    """A cut, a schedule with its options, and a number of microbatches and of replicas."""
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
    return Drawn(name, shares.side_by_side(plan), spans, shares.replicas)


def predicted_ns(asked: Asked, measured: Measurements, one: Drawn) -> float:
    """The predicted time of a step."""
    rows = asked.rows / one.plan.num_microbatches
    costs, speeds = measured.costs_of(one.plan, one.spans, rows), measured.speeds_for(rows)
    timeline = simulate_shared(one.plan, costs, speeds)
    return timeline.makespan_ns + measured.outside_ns(
        one.plan.num_actions, one.plan.placement.num_replicas
    )


def results(count: int, *, smoke: bool, on: Sequence[int] = (2, 4)) -> Iterator[dict[str, Any]]:
    """One for each configuration; as many on each number of devices."""
    for num_devices in on:
        asked = asked_of(num_devices, smoke=smoke)
        batch, draw = asked.batch(asked.rows), random.Random(num_devices)
        configurations = [drawn(asked, draw) for _ in range(count // len(on))]
        predicted, measured = [], []
        with left_alone([asked.model]), ExitStack() as opened:
            pipes = [
                opened.enter_context(asked.pipeline(one.plan, one.spans)) for one in configurations
            ]
            for _ in range(1 if smoke else TURNS):
                costs = measure(asked, lambda _: None)
                predicted.append([predicted_ns(asked, costs, one) for one in configurations])
                measured.append(medians(pipes, batch, ROUNDS))
        medians_ms = (
            [statistics.median(turns) / 1e6 for turns in zip(*of_turns, strict=True)]
            for of_turns in (predicted, measured)
        )
        for one, *times_ms in zip(configurations, *medians_ms, strict=True):
            yield {
                "devices": num_devices,
                "schedule": one.schedule,
                "microbatches": one.plan.num_microbatches,
                "replicas": one.replicas,
                "cut": [len(span) for span in one.spans],
                **dict(zip(("predicted_ms", "measured_ms"), times_ms, strict=True)),
            }


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
