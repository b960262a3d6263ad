"""A plan in two halves: all forwards, and what comes after them."""

from __future__ import annotations

from pykern._C import Kind, Plan

from .parts import PlanPart


def backward_half(plan: Plan) -> PlanPart:
    """What a plan does besides its forwards, in its own order, when all forwards are done.

    Leaving actions out, or doing them earlier, leaves the order of all others valid: an F needs
    only others, and whatever needs an F finds it done.
    """
    forwards, others = (
        [tuple(action for action in row if (action.kind is Kind.F) is wanted) for row in plan.rows]
        for wanted in (True, False)
    )
    rows = [(*first, *then) for first, then in zip(forwards, others, strict=True)]
    whole = Plan(plan.placement, plan.num_microbatches, rows, plan.num_slices)
    return PlanPart(whole, tuple(map(len, forwards)), tuple(map(len, rows)))
