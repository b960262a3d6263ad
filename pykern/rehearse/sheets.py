"""The tables of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from ..plan import Kind
from ..plan.costs import by_stage
from ..profiling.tables import Sheet, in_ms, stage_and_devices
from ..sizes.estimates import Bytes

if TYPE_CHECKING:
    from .prediction import StepPrediction
    from .report import Rehearsal, RehearsedPipeline

GIB = 2**30


def sheets_of(seen: Rehearsal) -> Iterator[Sheet]:
    """All tables of a rehearsal."""
    for number, one in enumerate(seen.pipelines):
        of = f" of pipeline {number}" if len(seen.pipelines) > 1 else ""
        yield _memory(one, of)
        if one.fit.notes:
            yield Sheet(f"Not known{of}", ("note",), [(note,) for note in one.fit.notes])
        yield _orders(one, of)
        if not isinstance(one.prediction, str):
            yield _times(one.prediction, of)
            yield _stages(one, one.prediction, of)
        if one.losses:
            yield _captures(one, of)
            yield _losses(one, of)
    if any(one.losses for one in seen.pipelines):
        yield _waits(seen)


def _memory(one: RehearsedPipeline, of: str) -> Sheet:
    names = [*(field.name for field in fields(Bytes)), "total"]
    rows = []
    for device, (gpu, held) in enumerate(zip(one.gpus, one.fit.devices, strict=False)):
        takes, has = one.fit.memory[gpu]
        row = [str(device), f"cuda:{gpu}", *(f"{getattr(held, n) / GIB:.3f}" for n in names)]
        fits = "not known" if has is None else "yes" if takes <= has else "no"
        rows.append((*row, "-" if has is None else f"{has / GIB:.3f}", fits))
    columns = ("device", "GPU", *names, "memory", "fits")
    return Sheet(f"Memory{of}, predicted, in GiB", columns, rows)


def _orders(one: RehearsedPipeline, of: str) -> Sheet:
    rows = [
        (way, *(str(orders.calls[name]) for name in ("waits", "records", "copies")), violation)
        for way, orders in one.orders.items()
        for violation in orders.violations or ["none"]
    ]
    columns = ("copies go", "waits", "records", "copies", "violations")
    return Sheet(f"Order of two steps{of}, checked against the model of a driver", columns, rows)


def _times(time: StepPrediction, of: str) -> Sheet:
    facts = [
        ("a step", f"{in_ms(time.step_ns)} ms"),
        ("its actions", f"{in_ms(time.timeline.makespan_ns)} ms"),
        ("the optimizer", f"{in_ms(time.update_ns)} ms"),
        ("bubble ratio", f"{time.timeline.bubble_ratio:.3f}"),
        ("rows/s", f"{time.rows_per_s:,.0f}"),
    ]
    if time.tokens_per_s is not None:
        facts.append(("tokens/s", f"{time.tokens_per_s:,.0f}"))
    return Sheet(
        f"Time{of}, predicted; the host is taken to be fast enough", ("part", "time"), facts
    )


def _stages(one: RehearsedPipeline, time: StepPrediction, of: str) -> Sheet:
    plan = one.plan
    kinds = [kind for kind in (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W) if plan.has(kind)]
    times = [by_stage(time.costs, kind, plan.num_stages) for kind in kinds]
    rows = [
        (*stage_and_devices(plan, stage), *(in_ms(each[stage]) for each in times))
        for stage in range(plan.num_stages)
    ]
    columns = ("stage", "device", *(f"{kind.name} ms" for kind in kinds))
    return Sheet(f"Stages{of}, predicted", columns, rows)


def _captures(one: RehearsedPipeline, of: str) -> Sheet:
    rows = [(why,) for why in one.obstacles] or [("none found",)]
    return Sheet(f"Reasons against CUDA graphs{of}", ("reason",), rows)


def _losses(one: RehearsedPipeline, of: str) -> Sheet:
    rows = [(str(number), f"{loss:.6f}") for number, loss in enumerate(one.losses)]
    return Sheet(f"Losses{of}, computed", ("step", "loss"), rows)


def _waits(seen: Rehearsal) -> Sheet:
    rows = [
        (
            f"{one.line.file}:{one.line.line}",
            one.line.inside or "-",
            one.call,
            one.action or "-",
            str(n),
        )
        for one, n in sorted(seen.waits.items())
    ]
    columns = ("line", "inside of", "call", "action", "times")
    return Sheet("The host waits for a GPU", columns, rows or [("nowhere", "", "", "", "")])
