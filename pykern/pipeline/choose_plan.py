"""From the user's arguments to the plan that runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .. import schedules
from ..plan import Kind, Plan, with_reductions
from ..plan.files import SUFFIXES
from ..plan.files.proved import MAX_ACTIONS
from ..plan.files.strict_json import shown
from ..plan.parts import Parts
from ..plan.shares import Shares
from ..runtime.replicas import KINDS
from ..search import search

Schedule = str | Plan | Callable[..., Plan]

_NO_MICROBATCHES = (
    "microbatches must be given, got None. It is the number of parts that a batch is cut into"
)


def choose_plan(
    schedule: Schedule,
    shares: Shares,
    num_layers: int,
    options: Mapping[str, Any],
    over_peers: bool = False,
    outside: bool = False,
) -> Plan:
    """The plan of a schedule, on all replicas and with the REDUCE actions that its steps need.

    Args:
        schedule: a name or function of `pykern.schedules`, a plan, or "auto".
        shares: the numbers of devices, microbatches and replicas; the schedule is for one replica.
        num_layers: the number of layers of the model, which is the most stages that "auto" makes.
        options: options of the schedule.
        over_peers: whether gradients are summed over other processes.
        outside: whether losses come from outside. "auto" then looks for a plan with all forwards
            first, unless options give the place of the loss, or the memory.

    Raises:
        TypeError, ValueError: the schedule is unknown, does not fit, or holds unsupported actions.
        PlanError: the plan cannot run at all.
    """
    _refuse_file(schedule)
    if schedule == "auto":
        chunks = max(1, min(search.MAX_CHUNKS, num_layers // shares.devices_of_one))
        if outside and "memory" not in options:
            options = {"loss": "outside", **options}
        options = {"max_chunks": chunks, **options}
    plan = _make_plan(schedule, shares, options)
    require_runnable(plan)
    return with_reductions(shares.side_by_side(plan), over_peers)


def choose_parts(schedule: Schedule, shares: Shares, options: Mapping[str, Any]) -> Parts:
    """The parts of a schedule that updates weights within a step.

    Args:
        schedule: a name or function of `pykern.schedules`.
        shares: the numbers of devices and microbatches.
        options: options of the schedule.

    Raises:
        TypeError, ValueError: the schedule is unknown, updates nothing, or cannot go on for ever.
        PlanError: its plan cannot run at all.
    """
    if isinstance(schedule, Plan) or schedule == "auto":
        raise ValueError(
            "schedule must be the name of one that updates weights within a step, or a function, "
            f"for AsyncPipeline, got {schedule!r}. A Plan ends, but such a schedule goes on"
        )
    if shares.num_microbatches is None:
        raise TypeError(_NO_MICROBATCHES)

    def make(num_microbatches: int) -> Plan:
        return _make_plan(schedule, replace(shares, num_microbatches=num_microbatches), options)

    if not make(shares.num_microbatches).has(Kind.U):
        raise ValueError(
            f"schedule must update weights for AsyncPipeline, got {schedule!r}. Make a "
            "pykern.Pipeline, and call optimizer.step() after its steps"
        )
    return Parts(make, shares.num_microbatches)


def _refuse_file(schedule: object) -> None:
    """Raises ValueError for the path of a plan."""
    if isinstance(schedule, str | os.PathLike) and str(schedule).endswith(SUFFIXES):
        raise ValueError(
            f"schedule must be a name or a Plan, got the file {str(schedule)!r}. Read it: "
            f"schedule=pykern.plan.load_plan({str(schedule)!r})"
        )


def require_runnable(plan: Plan) -> None:
    """Raises ValueError where the plan holds what stages do not run."""
    if plan.num_slices > 1:
        raise ValueError(
            f"the plan must have whole microbatches, got {plan.num_slices} slices of each, which "
            "stages do not run. Use such plans for simulation"
        )
    if plan.has(Kind.U):
        raise ValueError(
            "the plan must not update weights within a step, got U actions. Use "
            "pykern.AsyncPipeline, with the name of the schedule and optimizer="
        )
    for kind in Kind:
        if plan.has(kind) and kind not in KINDS:
            known = ", ".join(known.name for known in KINDS)
            raise ValueError(
                f"the plan must hold actions that stages run, {known}, got {kind.name}"
            )


def _make_plan(schedule: Schedule, shares: Shares, options: Mapping[str, Any]) -> Plan:
    """The plan of one replica, of a size for which a step is prepared in seconds."""
    microbatches = shares.num_microbatches
    # One F and one B on each device of a replica, before anything of a schedule is made.
    most = MAX_ACTIONS // (2 * shares.devices_of_one)
    if isinstance(microbatches, int) and microbatches > most:
        raise ValueError(
            f"microbatches must be at most {most} on {shares.num_devices} devices{shares.whose}, "
            f"got {microbatches}. Use fewer microbatches, or pass smaller batches to step"
        )
    plan = _made_plan(schedule, shares, options)
    num_actions = plan.num_actions * shares.replicas
    if num_actions > MAX_ACTIONS:
        raise ValueError(
            f"the actions of a step must be at most {MAX_ACTIONS}, got {num_actions} for "
            f"{plan.num_microbatches} microbatches of {plan.num_stages} stages. Use fewer "
            "microbatches or stages"
        )
    return plan


def _made_plan(schedule: Schedule, shares: Shares, options: Mapping[str, Any]) -> Plan:
    """The plan of one replica, of any size."""
    num_devices, microbatches = shares.devices_of_one, shares.microbatches_of_one
    if isinstance(schedule, Plan):
        if options:
            raise TypeError(
                f"options must be left out beside a Plan, got {', '.join(sorted(options))}"
            )
        if schedule.num_devices != num_devices:
            raise ValueError(
                f"devices must be {schedule.num_devices}{shares.whose}, as in the plan, got "
                f"{num_devices}"
            )
        if microbatches not in (None, schedule.num_microbatches):
            raise ValueError(
                f"microbatches must be {schedule.num_microbatches}{shares.whose}, as in the plan, "
                f"got {microbatches}"
            )
        return schedule
    if microbatches is None:
        raise TypeError(_NO_MICROBATCHES)
    if schedule == "auto":
        return search.auto(num_devices, microbatches, **options).plan
    if isinstance(schedule, str):
        schedules.require_named(schedule, "auto")
        schedule = schedules.by_name[schedule]
    made: object = schedule
    if callable(schedule):
        made = schedule(num_devices, microbatches, **options)
    if not isinstance(made, Plan):
        which = "a function of " if callable(schedule) else ""
        raise TypeError(
            "schedule must be a name, a Plan, or a function of (num_devices, num_microbatches) "
            f"that returns a Plan, got {which}{shown(made)}. For example schedule='one_f_one_b'"
        )
    return made
