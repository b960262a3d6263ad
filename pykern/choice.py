"""From what a user asks for to the plan that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import schedules, search
from .plan import Kind, Plan, with_reductions
from .runtime.executor import KINDS

Schedule = str | Plan | Callable[..., Plan]


def choose_plan(
    schedule: Schedule,
    num_devices: int,
    microbatches: int | None,
    num_layers: int,
    options: dict[str, Any],
) -> Plan:
    """The plan of a schedule, with what its steps need beside what the schedule says.

    Args:
        schedule: a name or function of `pykern.schedules`, a plan, or "auto".
        num_devices: how many devices there are.
        microbatches: how many parts a batch is cut into; may be None with a plan.
        num_layers: how many the model has: "auto" makes no more stages of them.
        options: for the schedule.

    Raises:
        TypeError, ValueError: the schedule is unknown, does not fit, or holds what cannot run here.
        PlanError: the plan cannot run at all.
    """
    if schedule == "auto":
        chunks = max(1, min(search.MAX_CHUNKS, num_layers // num_devices))
        options = {"max_chunks": chunks} | options
    plan = _make_plan(schedule, num_devices, microbatches, options)
    require_runnable(plan)
    return with_reductions(plan)


def require_runnable(plan: Plan) -> None:
    """Raises ValueError where the plan holds what stages do not run."""
    if plan.num_slices > 1:
        raise ValueError(
            f"the plan cuts microbatches into {plan.num_slices} slices; stages run whole ones"
        )
    for kind in Kind:
        if plan.has(kind) and kind not in KINDS:
            known = ", ".join(known.name for known in KINDS)
            raise ValueError(f"the plan holds {kind.name} actions; stages run {known}")


def _make_plan(
    schedule: Schedule, num_devices: int, microbatches: int | None, options: dict[str, Any]
) -> Plan:
    if isinstance(schedule, Plan):
        if options:
            raise TypeError(f"a Plan takes no schedule options, got {', '.join(sorted(options))}")
        if schedule.num_devices != num_devices:
            raise ValueError(
                f"the plan is for {schedule.num_devices} devices, but there are {num_devices}"
            )
        if microbatches not in (None, schedule.num_microbatches):
            raise ValueError(
                f"microbatches={microbatches}, but the plan is for {schedule.num_microbatches}"
            )
        return schedule
    if microbatches is None:
        raise TypeError("Pipeline needs microbatches=N: how many parts a batch is cut into")
    if schedule == "auto":
        return search.auto(num_devices, microbatches, **options).plan
    if isinstance(schedule, str):
        if schedule not in schedules.by_name:
            known = ", ".join(sorted(["auto", *schedules.by_name]))
            raise ValueError(f"schedule {schedule!r} is unknown; there are {known}")
        schedule = schedules.by_name[schedule]
    return schedule(num_devices, microbatches, **options)
