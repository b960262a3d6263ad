"""The values of `Costs` by name, and costs that differ from others in some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pykern._C import Costs, Kind, Plan

# Times of actions, NaN where a time is not known.
TIME_OF = {
    Kind.F: "forward_ns",
    Kind.B: "backward_ns",
    Kind.R: "recompute_ns",
    Kind.I: "input_ns",
    Kind.W: "weight_ns",
    Kind.U: "update_ns",
    Kind.REDUCE: "reduce_ns",
}
TIMES = tuple(TIME_OF.values())
# One number, or a list with one for each stage.
STAGE_COSTS = (*TIMES, "message_bytes")
COSTS = (
    *STAGE_COSTS,
    "transfer_ns",
    "overhead_ns",
    "bandwidth",
    "shared_links",
    "overlap",
    "device_speeds",
)


def changed(costs: Costs, **values: Any) -> Costs:
    """Costs with these values instead of their own, and all others as they are."""
    return Costs(**({name: getattr(costs, name) for name in COSTS} | values))


def each(value: float | list[float], count: int) -> list[float]:
    """The value of each stage, or device, where one number stands for all."""
    return list(value) if isinstance(value, list) else [value] * count


def by_stage(costs: Costs, kind: Kind, num_stages: int) -> list[float]:
    """The time of the kind for each stage; NaN if it did not run."""
    return each(getattr(costs, TIME_OF[kind]), num_stages)


def by_device(plan: Plan, of: Sequence[float]) -> list[float]:
    """Sums over the stages of each device."""
    sums = [0.0] * plan.num_devices
    for homes in plan.placement.replicas:
        for stage, device in enumerate(homes):
            sums[device] += of[stage]
    return sums
