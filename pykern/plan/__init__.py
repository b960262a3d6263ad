"""The planner: placements, plans, their check and simulation. It needs neither torch nor a GPU."""

from pykern._C import (
    Action,
    Costs,
    Kind,
    Memory,
    Placement,
    Plan,
    PlanError,
    Span,
    Timeline,
    by_phases,
    by_slots,
    check,
    check_memory,
    peak_bytes,
    simulate,
    with_reductions,
)
from pykern.plan.counts import require_counts
from pykern.plan.files import load_plan, load_plan_and_costs, save_plan

__all__ = [
    "Action",
    "Costs",
    "Kind",
    "Memory",
    "Placement",
    "Plan",
    "PlanError",
    "Span",
    "Timeline",
    "by_phases",
    "by_slots",
    "check",
    "check_memory",
    "load_plan",
    "load_plan_and_costs",
    "peak_bytes",
    "require_counts",
    "save_plan",
    "simulate",
    "with_reductions",
]
