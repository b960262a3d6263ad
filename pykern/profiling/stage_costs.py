"""Costs of stages by kind, as arithmetic on them needs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, median_low

from ..plan import Costs, Kind, Plan, simulate
from ..plan.costs import TIME_OF, by_stage, changed, each

# The kinds of actions in tables, in their order.
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)


def mapped(costs: Costs, num_stages: int, change: Callable[[Kind, int, float], float]) -> Costs:
    """Costs with other times: `change` gets kind, stage and time, and returns the time."""
    return changed(
        costs,
        **{
            TIME_OF[kind]: [
                change(kind, stage, ns)
                for stage, ns in enumerate(by_stage(costs, kind, num_stages))
            ]
            for kind in KINDS
        },
    )


def median_costs(of_steps: Sequence[Costs], num_stages: int) -> Costs:
    """The costs of several steps: of each time by kind and stage, the lower median.

    A mean of the two in the middle could have one that the timeline, a step that ran, has not.
    """

    def middle(kind: Kind, stage: int, _: float) -> float:
        return median_low(by_stage(costs, kind, num_stages)[stage] for costs in of_steps)

    messages = zip(*(message_ns(costs, num_stages) for costs in of_steps), strict=True)
    return with_messages(mapped(of_steps[0], num_stages, middle), list(map(median_low, messages)))


def message_ns(costs: Costs, num_stages: int) -> list[float]:
    """By boundary, the time of a message on its way."""
    sizes = each(costs.message_bytes, num_stages)
    return [costs.transfer_ns + size / costs.bandwidth for size in sizes]


def with_messages(costs: Costs, times: Sequence[float]) -> Costs:
    """Costs with these times of messages, by boundary, which follow each other over a link."""
    of = {"transfer_ns": 0.0, "message_bytes": list(times), "bandwidth": 1.0}
    return changed(costs, **of, shared_links=True)


def without_overhead(costs: Costs, num_stages: int, action_ns: Mapping[Kind, float]) -> Costs:
    """The costs of the layers alone."""
    return mapped(costs, num_stages, lambda kind, _, ns: ns - min(action_ns.get(kind, 0.0), ns))


def balanced(costs: Costs, plan: Plan) -> Costs:
    """The same work, with equal times for all stages that run a kind at all."""
    # A stage with I and W has a time of B as well, which counts where the stage runs B.
    ran = {(action.kind, action.stage) for row in plan.rows for action in row}
    means = {
        kind: fmean(
            ns
            for stage, ns in enumerate(by_stage(costs, kind, plan.num_stages))
            if (kind, stage) in ran
        )
        for kind in KINDS
        if plan.has(kind)
    }
    return mapped(
        costs,
        plan.num_stages,
        lambda kind, stage, ns: means[kind] if (kind, stage) in ran else ns,
    )


def work_ns(costs: Costs, plan: Plan) -> float:
    """The time of all actions of a step on one device."""
    times = {kind: by_stage(costs, kind, plan.num_stages) for kind in KINDS}
    actions = (action for row in plan.rows for action in row)
    return sum(times[a.kind][a.stage] for a in actions if a.kind in times)


def of_stages(costs: Costs, plan: Plan) -> list[float]:
    """By stage, the time of F and of one backward, whole or in halves, for one microbatch."""
    kinds = (Kind.F, Kind.B) if plan.has(Kind.B) else (Kind.F, Kind.I, Kind.W)
    times = [by_stage(costs, kind, plan.num_stages) for kind in kinds if plan.has(kind)]
    return [sum(known(of)) for of in zip(*times, strict=True)]


def known(times: Iterable[float]) -> list[float]:
    """Those that were measured."""
    return [ns for ns in times if not math.isnan(ns)]


def makespan_ns(plan: Plan, costs: Costs) -> float:
    """The simulated time of a step."""
    return simulate(plan, costs).makespan_ns
