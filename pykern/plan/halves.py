"""A plan in two halves: all forwards, then all other actions."""

from __future__ import annotations

from pykern._C import Kind, Plan

from .parts import PlanPart


def forwards_first(plan: Plan) -> Plan:
    """The plan with the forwards of each device before its other actions, each in their order.

    What is valid stays so: an F needs only others, and whatever needs an F finds it done.
    """
    rows = [sorted(row, key=lambda action: action.kind is not Kind.F) for row in plan.rows]
    return Plan(plan.placement, plan.num_microbatches, rows, plan.num_slices)


def backward_half(plan: Plan) -> PlanPart:
    """The actions of a plan behind its forwards."""
    whole = forwards_first(plan)
    num_forwards = [sum(action.kind is Kind.F for action in row) for row in whole.rows]
    return PlanPart(whole, tuple(num_forwards), tuple(map(len, whole.rows)))
