"""A plan in two halves: all forwards, then all other actions."""

from __future__ import annotations

from pykern._C import Kind, Plan

from .parts import PlanPart


def forwards_first(plan: Plan) -> Plan:
    """The plan with the forwards of each device before its other actions, each in their order.

    A valid plan stays valid: an F needs only other Fs, and actions that need an F come after it.
    """
    rows = [sorted(row, key=lambda action: action.kind is not Kind.F) for row in plan.rows]
    return Plan(plan.placement, plan.num_microbatches, rows, plan.num_slices)


def backward_half(plan: Plan) -> PlanPart:
    """The part of a plan that follows its forwards."""
    whole = forwards_first(plan)
    num_forwards = [sum(action.kind is Kind.F for action in row) for row in whole.rows]
    return PlanPart(whole, tuple(num_forwards), tuple(map(len, whole.rows)))
