"""A plan whose stages are single units of a model, in the order in which larger stages run them."""

from __future__ import annotations

from collections.abc import Sequence

from ..partition.bottleneck import spans_of
from ..plan import Action, Kind, Placement, Plan


def by_unit(plan: Plan, spans: Sequence[range]) -> Plan:
    """The plan with a stage for each unit, so that a step shows what every unit takes.

    A device runs the same units in the same order as with the plan itself, so caches and
    neighbours are those of a real step.

    Args:
        plan: of one replica.
        spans: by stage, its units.
    """
    homes = [plan.placement.device_of(stage) for stage, span in enumerate(spans) for _ in span]
    rows = [
        [
            Action(action.kind, unit, action.microbatch)
            for action in row
            for unit in _in_order(action.kind, spans[action.stage])
        ]
        for row in plan.rows
    ]
    return Plan(Placement(plan.num_devices, homes), plan.num_microbatches, rows)


def _in_order(kind: Kind, span: range) -> range:
    """Gradients come back through the units; a W needs the I of its own unit alone."""
    return span[::-1] if kind in (Kind.B, Kind.I) else span


def even_spans(num_units: int, num_stages: int) -> list[range]:
    """Stages of near-equal numbers of units."""
    return list(spans_of([num_units * stage // num_stages for stage in range(1, num_stages + 1)]))
