"""The planner: placements, plans, their check and simulation. It needs neither torch nor a GPU."""

from pykern._C import (
    Action,
    Costs,
    Kind,
    Placement,
    Plan,
    PlanError,
    Span,
    Timeline,
    by_phases,
    by_slots,
    check,
    simulate,
)
from pykern.plan.counts import require_counts

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Placement",
    "Plan",
    "PlanError",
    "Span",
    "Timeline",
    "by_phases",
    "by_slots",
    "check",
    "require_counts",
    "simulate",
]
