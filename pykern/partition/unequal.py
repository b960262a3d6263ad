"""Cuts of a plan's stages for devices of unequal speed, and their distance from a bound."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from ..plan import Costs, Kind, Plan, simulate
from ..plan.counts import require_lists
from .bottleneck import spans_of

if TYPE_CHECKING:
    from .balance import Partition

# The number of equal parts of a layer's cost: F, and each half of its backward.
_PARTS = 3


def stage_speeds(plan: Plan, speeds: Sequence[float]) -> list[float]:
    """The speed of each stage's device, the slowest of its replicas' devices."""
    return [
        min(speeds[device] for device in of) for of in zip(*plan.placement.replicas, strict=True)
    ]


class StageDevices(NamedTuple):
    """The devices of stages, as `partition` takes them.

    Attributes:
        speeds: by stage; None for equal devices.
        memory: by stage, the bytes that it may hold; None for any number.
    """

    speeds: Sequence[float] | None = None
    memory: Sequence[float] | None = None

    def require(self, num_stages: int, balance: object) -> None:
        """Refuses lists that are not for so many stages, or not for this balance.

        Raises:
            TypeError: one is not a list of numbers.
            ValueError: it has another length, a number out of range, or nothing that uses it.
        """
        require_lists(**self._asdict())
        for name, values in self._asdict().items():
            if values is not None and len(values) != num_stages:
                raise ValueError(
                    f"{name} must have an entry for each of {num_stages} stages, got "
                    f"{len(values)}. Give one for each stage's device"
                )
            for value in values or ():
                if not value > 0 or (name == "speeds" and value == inf):
                    raise ValueError(f"{name} must hold finite numbers above 0, got {value}")
        if self.memory is not None and balance not in ("time", "memory"):
            raise ValueError(
                "memory must go with balance 'time' or 'memory', which count bytes, got "
                f"{balance!r}. Leave it out"
            )


ALIKE = StageDevices()


def stage_memory(plan: Plan, memory: Sequence[float]) -> list[float]:
    """The bytes that each stage may hold: stages of a device share its memory evenly.

    Stages with several replicas have the memory of the smallest of their devices.
    """
    homes = plan.placement.replicas
    stages_of = [sum(of.count(device) for of in homes) for device in range(plan.num_devices)]
    return [
        min(memory[device] / stages_of[device] for device in of) for of in zip(*homes, strict=True)
    ]


def improved(cut: Partition, plan: Plan, speeds: Sequence[float]) -> Partition:
    """The cut after moving its boundaries by one layer as long as a simulated step gets shorter.

    The forward takes a third of a cost. The simulated step includes the waits of devices for each
    other, so that stages at the ends of a pipeline may take longer than others.

    Args:
        cut: a cut whose stages take equal time.
        plan: the plan of the stages.
        speeds: the speeds by device.

    Returns:
        The cut, with `above_bound`.
    """

    def step(stages: Sequence[range]) -> float:
        of_stages = [sum(cut.layer_costs[layer] for layer in stage) for stage in stages]
        part = [float(cost) / _PARTS for cost in of_stages]
        costs = Costs(
            part,
            [2 * each for each in part],
            recompute_ns=part,
            input_ns=part,
            weight_ns=part,
            device_speeds=list(speeds),
        )
        return simulate(plan, costs).makespan_ns

    stages, least = cut.stages, step(cut.stages)
    while True:
        near = [of for of in neighbours(stages) if all(one.kept_by(of) for one in cut.limits)]
        times = {of: step(of) for of in near}
        best = min(times, key=times.__getitem__, default=stages)
        if times.get(best, least) >= least:
            break
        stages, least = best, times[best]
    bound = bound_of(sum(cut.layer_costs), plan, speeds)
    return replace(cut.with_stages(stages), above_bound=least / bound - 1 if bound > 0 else None)


def neighbours(spans: tuple[range, ...]) -> Iterator[tuple[range, ...]]:
    """The cuts with one boundary one unit further on or back."""
    for index in range(len(spans) - 1):
        for by in (-1, 1):
            ends = [span.stop for span in spans]
            ends[index] += by
            if spans[index].start < ends[index] < ends[index + 1]:
                yield spans_of(ends)


def bound_of(cost: float, plan: Plan, speeds: Sequence[float]) -> float:
    """A lower bound on the time of a step, over all cuts and all orders on these devices.

    All devices together do `sum(speeds)` of the work at a time. With a stage on each device, a
    device also waits for the forwards of the stages in front of its own, and after its last
    backward for theirs. For any shares x of the work, device d takes
    `microbatches * x[d] / speeds[d]` and a share of the same for each device in front of it. Prices
    of these times whose sum is at least each speed bound the whole step from below.

    Args:
        cost: the cost of all layers, forward and backward, for a microbatch.
        plan: gives the numbers of microbatches and devices.
        speeds: the speeds by device.
    """
    count = plan.num_microbatches
    waits = 0.0
    if plan.first_trained == 0 and plan.placement.replicas == (tuple(range(plan.num_devices)),):
        # A weight gradient may be computed while stages in front are at their backwards.
        waits = 1 / _PARTS if plan.has(Kind.W) else 1.0
    prices = 0.0
    for speed in reversed(speeds):
        prices += max(0.0, (speed - waits * prices) / count)
    return cost / prices
