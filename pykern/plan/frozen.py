"""Times of actions in a plan whose stages do not all train."""

from __future__ import annotations

from collections.abc import Collection

from pykern._C import Costs
from pykern.plan.costs import changed, each


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
