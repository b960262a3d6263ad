"""The predicted time of a rehearsed step: simulated, with times from the rates of a box."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from ..boxes import Box
from ..plan import Costs, Kind, Timeline, simulate
from ..runtime.devices import DeviceLane
from ..sizes.estimates import Estimate
from .watched import Watched


@dataclass(frozen=True)
class StepPrediction:
    """A step, as the rates of a box would have it.

    Attributes:
        costs: of the plan's actions.
        timeline: the simulated timeline of the actions.
        update_ns: the time of the optimizer's step, which is bound by memory.
        rows_per_s: of the batch.
        tokens_per_s: likewise; None if rows are not rows of integers.
    """

    costs: Costs
    timeline: Timeline
    update_ns: float
    rows_per_s: float
    tokens_per_s: float | None

    @property
    def step_ns(self) -> float:
        """From the batch to the new parameters."""
        return self.timeline.makespan_ns + self.update_ns


def predicted(watched: Watched, box: Box) -> StepPrediction | str:
    """The prediction, or the reason for having none: unknown times, bytes or links."""
    if not watched.losses:
        return "no step was run"
    if missing := _missing_rates(box):
        return f"the profile of {box.name} lacks {missing}"
    found = None if watched.fit is None else watched.fit.found
    if found is None:
        return "the bytes between stages are not known"
    messages = _message_ns(watched, found, box)
    if messages is None:
        return f"the profile of {box.name} lacks links between the devices of the plan"
    costs = _costs(watched, messages)
    timeline = simulate(watched.plan, costs)
    update_ns = _update_ns(found, watched.asked.lanes, box)
    rows_per_s = watched.rows / (timeline.makespan_ns + update_ns) * 1e9
    tokens_per_s = None if watched.tokens is None else rows_per_s * watched.tokens
    return StepPrediction(costs, timeline, update_ns, rows_per_s, tokens_per_s)


def _missing_rates(box: Box) -> str:
    rates = {"operations per time": "flops_per_ns", "the rate of memory": "memory_bytes_per_ns"}
    return " and ".join(
        name
        for name, key in rates.items()
        if not all(getattr(device, key) for device in box.devices)
    )


def _costs(watched: Watched, messages: Sequence[float]) -> Costs:
    stages = range(watched.plan.num_stages)

    def of(kind: Kind) -> list[float]:
        return [fmean(watched.times[kind, stage] or [0.0]) for stage in stages]

    inputs, weights = of(Kind.I), of(Kind.W)
    # A frozen stage has B alone, beside others with I and W.
    pairs = zip(of(Kind.B), inputs, weights, strict=True)
    return Costs(
        of(Kind.F),
        [whole or i + w for whole, i, w in pairs],
        recompute_ns=of(Kind.R),
        input_ns=inputs,
        weight_ns=weights,
        # Times rather than sizes: boundaries differ in their links, a plan's costs have one speed.
        message_bytes=messages,
        bandwidth=1.0,
        shared_links=True,
    )


def _message_ns(watched: Watched, found: Estimate, box: Box) -> list[float] | None:
    """The time of each stage's output, or its gradient, on its way; None for unknown links."""
    lanes = [watched.asked.lanes[one] for one in watched.plan.placement.replicas[0]]
    times = []
    for handed, (lane, after) in zip(found.handed_bytes, pairwise(lanes), strict=False):
        link = box.link(lane.device.index, after.device.index)
        if lane.device == after.device:
            times.append(0.0)
        elif link is None:
            return None
        else:
            times.append(link.latency_ns + handed / link.bytes_per_ns)
    return [*times, 0.0]


def _update_ns(found: Estimate, lanes: Sequence[DeviceLane], box: Box) -> float:
    """An optimizer reads all that it has, and writes all but gradients; GPUs do so at once."""
    times: dict[int, float] = defaultdict(float)
    for held, lane in zip(found.devices, lanes, strict=True):
        rate = box.devices[lane.device.index].memory_bytes_per_ns or 0.0
        moved = 2 * (held.parameters + held.optimizer) + held.gradients
        times[lane.device.index] += moved / rate
    return max(times.values())
