"""The values of `Costs` by name, and costs that differ from others in some of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


def require_costs_or_function(costs: object) -> None:
    """Raises TypeError unless these are costs, or a function that may make them."""
    if not (isinstance(costs, Costs) or callable(costs)):
        raise TypeError(
            f"costs must be Costs, or a function from a number of stages to Costs, got {costs!r}. "
            "Give pykern.plan.Costs(forward_ns, backward_ns)"
        )


def require_made_costs(made: object) -> Costs:
    """The result of a function; raises TypeError unless these are costs."""
    if not isinstance(made, Costs):
        raise TypeError(f"costs must return Costs for a number of stages, got {made!r}")
    return made


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


def costs_with_frozen(costs: Costs, num_stages: int, stages: Collection[int]) -> Costs:
    """The costs where these stages are frozen: a B hands gradients on, and W has nothing to do.

    For the plan that `Plan.with_frozen` gives.

    Args:
        costs: of a model that trains everything; I and W are known.
        num_stages: of the plan.
        stages: the frozen ones.

    Raises:
        ValueError: A stage is not one of the plan's.
    """
    for stage in stages:
        if not 0 <= stage < num_stages:
            raise ValueError(f"stages must be 0 to {num_stages - 1}, got {stage}")

    def chosen(frozen: float | list[float], trained: float | list[float]) -> list[float]:
        pairs = enumerate(zip(each(frozen, num_stages), each(trained, num_stages), strict=True))
        return [f if stage in stages else t for stage, (f, t) in pairs]

    return changed(
        costs,
        backward_ns=chosen(costs.input_ns, costs.backward_ns),
        weight_ns=chosen(0.0, costs.weight_ns),
        update_ns=chosen(0.0, costs.update_ns),
        reduce_ns=chosen(0.0, costs.reduce_ns),
    )
