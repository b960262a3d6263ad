"""The tables of a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..plan import Bubble, Kind, Plan, bubbles, critical_path
from ..plan.costs import by_stage
from .causes import Causes
from .changes import Improvement
from .observed import Observed
from .stage_costs import KINDS

# A cause with less of the makespan than this needs no remedy.
LEAST_SHARE = 0.02
# A table has so many layers at most.
MOST_LAYERS = 20


class Sheet(NamedTuple):
    """A table in words: its title, its columns and its rows."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def of_causes(seen: Observed, causes: Causes) -> Sheet:
    """The parts of the makespan, the work first."""
    total = seen.timeline.makespan_ns
    rows = [("work, shared evenly", *_share(causes.work_ns, total), "")]
    for cause in causes.found:
        remedy = cause.remedy if cause.worth_ns >= LEAST_SHARE * total else ""
        rows.append((cause.name, *_share(cause.worth_ns, total), remedy))
    return Sheet("Why a step takes its time", ("part", "ms", "of it", "remedy"), rows)


def of_devices(seen: Observed) -> Sheet:
    """By device, its bubble as measured and predicted, and the parts of the measured one."""
    measured = bubbles(seen.plan, seen.timeline)
    predicted = bubbles(seen.plan, seen.costs)
    rows = []
    for device, (was, then) in enumerate(zip(measured, predicted, strict=True)):
        row = (
            str(device),
            in_ms(seen.timeline.busy_ns(device)),
            in_ms(sum(parts_of(was))),
            in_ms(sum(parts_of(then))),
            *map(in_ms, parts_of(was)),
            str(seen.timeline.peak_in_flight(device)),
        )
        held = _in_mib(seen.held_bytes[device]) if seen.held_bytes else "-"
        peak = _in_mib(seen.peak_bytes[device]) if seen.peak_bytes else "not measured"
        rows.append((*row, held, peak))
    columns = (
        *("device", "busy", "bubble", "as planned", "warm-up", "cool-down"),
        *("input computed", "input handed", "issue", "in flight", "MiB planned", "peak MiB"),
    )
    return Sheet("Devices, in ms: the bubble and its parts", columns, rows)


def of_stages(seen: Observed) -> Sheet:
    """By stage, the times of its kinds, and its part of the critical path."""
    plan = seen.plan
    on_path = [0.0] * plan.num_stages
    for step in critical_path(plan, seen.timeline):
        on_path[step.span.action.stage] += step.span.end_ns - step.span.start_ns
    kinds = [kind for kind in KINDS if plan.has(kind)]
    times = [by_stage(seen.costs, kind, plan.num_stages) for kind in kinds]
    rows = [
        (
            *stage_and_devices(plan, stage),
            str(len(seen.spans[stage])) if seen.spans else "-",
            *(in_ms(of[stage]) for of in times),
            f"{on_path[stage] / seen.timeline.makespan_ns:.1%}",
        )
        for stage in range(plan.num_stages)
    ]
    columns = ("stage", "device", "layers", *(f"{kind.name} ms" for kind in kinds), "on path")
    return Sheet("Stages: mean times, and their part of the critical path", columns, rows)


def stage_and_devices(plan: Plan, stage: int) -> tuple[str, str]:
    """The number of a stage, and those of the devices of its replicas."""
    return str(stage), ", ".join(str(homes[stage]) for homes in plan.placement.replicas)


def of_layers(seen: Observed) -> Sheet:
    """The layers that take longest, in their order."""
    times = seen.layer_ns
    longest = sorted(range(len(times)), key=lambda layer: -times[layer])[:MOST_LAYERS]
    homes = {layer: stage for stage, span in enumerate(seen.spans) for layer in span}
    names = seen.layer_names or list(map(str, range(len(times))))
    rows = [
        (names[n], str(homes.get(n, "-")), in_ms(times[n]), f"{times[n] / sum(times):.1%}")
        for n in sorted(longest)
    ]
    which = f"the {MOST_LAYERS} longest of {len(times)}, " if len(times) > MOST_LAYERS else ""
    title = f"Layers: {which}forward and backward of a microbatch, outside of the pipeline"
    return Sheet(title, ("layer", "stage", "ms", "of all"), rows)


def of_path(seen: Observed) -> Sheet:
    """The critical path by stage and kind, and the time between its actions."""
    times: dict[tuple[int, Kind], list[float]] = {}
    for step in critical_path(seen.plan, seen.timeline):
        action, took = step.span.action, step.span.end_ns - step.span.start_ns
        times.setdefault((action.stage, action.kind), []).append(took)
    total = seen.timeline.makespan_ns
    rows = [
        (str(stage), kind.name, str(len(of)), *_share(sum(of), total))
        for (stage, kind), of in sorted(times.items(), key=lambda one: -sum(one[1]))
    ]
    between = total - sum(map(sum, times.values()))
    rows.append(("-", "gaps", "-", *_share(between, total)))
    return Sheet("The critical path", ("stage", "kind", "actions", "ms", "of it"), rows)


def of_changes(changes: Sequence[Improvement]) -> Sheet:
    """The changes with their predicted times, and the activations that they hold."""
    columns = ("change", "ms then", "gain", "activations", "basis")
    rows = [
        (one.name, in_ms(one.step_ns), f"{one.gain:.1%}", f"x{one.held:.2g}", one.basis)
        for one in changes
    ]
    return Sheet("Changes that would help", columns, rows or [("none found", "", "", "", "")])


def parts_of(bubble: Bubble) -> tuple[float, ...]:
    """The parts of the idle time of a device, in the order of the table."""
    ends = bubble.before_first_ns, bubble.after_last_ns
    return *ends, bubble.compute_ns, bubble.transfer_ns, bubble.issue_ns


def in_ms(ns: float) -> str:
    """The time in milliseconds, in words; a dash for a kind that a stage does not run."""
    return "-" if math.isnan(ns) else f"{ns / 1e6:.2f}"


def _in_mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f}"


def _share(ns: float, total_ns: float) -> tuple[str, str]:
    return in_ms(ns), f"{ns / total_ns:.1%}"
