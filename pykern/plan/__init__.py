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
    by_program,
    by_slots,
    check,
    check_memory,
    peak_bytes,
    simulate,
    with_reductions,
)
from pykern.plan.counts import require_counts

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
    "by_program",
    "by_slots",
    "check",
    "check_memory",
    "peak_bytes",
    "require_counts",
    "simulate",
    "with_reductions",
]
