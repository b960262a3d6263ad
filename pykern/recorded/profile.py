"""A profile of the steps in a recording: what ran when, as in `Pipeline.profile`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from ..columns import counted
from ..plan import Action, Kind, Placement, Plan, PlanError, Span, Timeline, check
from ..profiling import Observed, Report, report_of
from ..profiling.hidden import hidden_share
from ..profiling.mean_costs import mean_costs
from ..profiling.stage_costs import median_costs
from ..profiling.tables import Sheet, in_ms
from .halves import joined
from .steps import Recorded, RecordedStep

_MOVES = (Kind.COPY_F, Kind.COPY_B, Kind.OFFLOAD, Kind.LOAD)


def profile_of(
    steps: Sequence[RecordedStep], name: str, remedy: str, num_cores: int | None = None
) -> Report:
    """The profile of the steps in a recording.

    The steps with the most frequent actions count. A backward through an output counts with its
    forward, without the time between them. On GPUs an action lasts from the start of its first
    kernel or copy there to the end of its last one; on CPU workers its range is its span.

    Args:
        steps: by their starts.
        name: of the file.
        remedy: for a file without a step that has actions.
        num_cores: of the machine; None if it is not known.

    Raises:
        ValueError: the recording has no step of a pipeline of pykern, or parts of steps alone.
    """
    steps = joined(steps)
    whole = [step for step in steps if any(ran.action.kind not in _MOVES for ran in step.ran)]
    if not whole:
        raise ValueError(
            f"the file must have a step of a pipeline with its actions, got "
            f"{counted(len(steps), 'step')} without actions in {name}. {remedy}"
        )
    by_form: dict[object, list[tuple[RecordedStep, Timeline]]] = {}
    for step in whole:
        timeline = timeline_of(step)
        form = tuple(map(_actions_of, timeline.rows))
        by_form.setdefault(form, []).append((step, timeline))
    alike = max(by_form.values(), key=len)
    return _profile(alike, len(steps) - len(alike), num_cores)


def _actions_of(row: Sequence[Span]) -> tuple[Action, ...]:
    return tuple(span.action for span in row)


def _profile(
    ran: Sequence[tuple[RecordedStep, Timeline]], left_out: int, cores: int | None
) -> Report:
    on_gpus = any(one.gpu_ns for step, _ in ran for one in step.ran)
    by_length = sorted(ran, key=lambda one: one[1].makespan_ns)
    middle, timeline = by_length[(len(by_length) - 1) // 2]
    if not timeline.makespan_ns:
        raise ValueError("the actions of a step must take time, got 0 ns. Record larger layers")
    plan = plan_of(timeline)
    costs = [mean_costs(of_step, _copies(step), plan.num_stages) for step, of_step in ran]
    seen = Observed(
        plan=plan,
        timeline=timeline,
        costs=median_costs(costs, plan.num_stages),
        # A recording does not tell the model, so no other plan can be made for it.
        make_plan=lambda *_: plan,
        step_ns=timeline.makespan_ns,
        num_steps=len(ran),
        rows=None,
        # A recording that does not tell the cores is read as one of workers with a core each.
        num_cores=None if on_gpus else cores or plan.num_devices,
    )
    tables = [_issue_table(middle)] if on_gpus else []
    if left_out:
        tables.append(Sheet("Other steps, left out", ("steps",), [(str(left_out),)]))
    return replace(report_of(seen), more=tables, details=_works(middle))


def _span(ran: Recorded, since_ns: int = 0) -> Span:
    start, end = ran.gpu_ns or (ran.start_ns, ran.end_ns)
    return Span(ran.action, start - since_ns, end - since_ns)


def timeline_of(step: RecordedStep) -> Timeline:
    """The actions of a step by device; times count from the step's start."""
    actions = [ran for ran in step.ran if ran.action.kind not in _MOVES]
    rows: list[list[Span]] = [[] for _ in range(1 + max(ran.device for ran in actions))]
    for ran in actions:
        rows[ran.device].append(_span(ran, step.start_ns))
    return Timeline([sorted(row, key=lambda span: span.start_ns) for row in rows])


def _copies(step: RecordedStep) -> Timeline:
    """The copies between devices of a step, each in a row of its own: they may overlap."""
    moved = (ran for ran in step.ran if ran.action.kind in (Kind.COPY_F, Kind.COPY_B))
    return Timeline([[_span(ran, step.start_ns)] for ran in moved])


def _works(step: RecordedStep) -> dict[str, Timeline]:
    """Each kernel of a step, and each copy between devices, as a span of its action."""
    kernels: dict[int, list[Span]] = {ran.device: [] for ran in step.ran}
    # Copies of one boundary and direction follow each other, others may overlap.
    copies: dict[tuple[int, str, int], list[Span]] = {}
    for ran in step.ran:
        works = [
            Span(ran.action, start - step.start_ns, end - step.start_ns)
            for start, end in ran.works_ns
        ]
        if ran.action.kind in (Kind.COPY_F, Kind.COPY_B):
            lane = ran.device, ran.action.kind.name, ran.action.stage
            copies.setdefault(lane, []).extend(works)
        elif ran.action.kind not in _MOVES:
            kernels[ran.device] += works
    rows = {"kernels": _by_key(kernels), "copies": _by_key(copies)}
    return {name: Timeline(of) for name, of in rows.items() if any(of)}


def _by_key(rows: Mapping[Any, list[Span]]) -> list[list[Span]]:
    return [sorted(rows[key], key=lambda span: span.start_ns) for key in sorted(rows)]


def plan_of(timeline: Timeline) -> Plan:
    """The plan that a timeline shows: each device's actions in the order of their starts.

    Raises:
        ValueError: the actions are not those of a whole step.
    """
    homes: dict[int, dict[int, int]] = {}
    for device, row in enumerate(timeline.rows):
        for span in row:
            if span.action.kind is Kind.F:
                homes.setdefault(span.action.microbatch, {})[span.action.stage] = device
    paths = [tuple(of[stage] for stage in sorted(of)) for _, of in sorted(homes.items())]
    # Microbatches go to the replicas in turn.
    num_replicas = max(len(set(paths)), 1)
    try:
        placement = Placement.replicated(timeline.num_devices, paths[:num_replicas])
        plan = Plan(placement, len(homes), [_actions_of(row) for row in timeline.rows])
        check(plan)
    except (PlanError, ValueError) as error:
        raise ValueError(
            f"the actions of a step must make a plan, got others: {error}. Record whole steps: "
            "Pipeline.step, without asynchronous updates"
        ) from error
    return plan


def _issue_table(step: RecordedStep) -> Sheet:
    """By kind, the time to issue actions, and their time on GPUs."""
    rows = []
    for kind in Kind:
        ran = [one for one in step.ran if one.action.kind is kind]
        if ran:
            issue = fmean(one.end_ns - one.start_ns for one in ran)
            on_gpu = fmean(span.end_ns - span.start_ns for span in map(_span, ran))
            rows.append((kind.name, str(len(ran)), in_ms(issue), in_ms(on_gpu)))
    moved = [_span(one) for one in step.ran if one.action.kind in _MOVES]
    if moved:
        share = hidden_share(
            moved, (_span(one) for one in step.ran if one.action.kind not in _MOVES)
        )
        rows.append(("copies beside work", "-" if share is None else f"{share:.0%}", "", ""))
    return Sheet("Issue and GPU", ("kind", "actions", "issue ms", "GPU ms"), rows)
