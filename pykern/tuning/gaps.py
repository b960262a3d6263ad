"""The time between actions of a step: to issue an action, and to hand over to another device."""

from __future__ import annotations

from ..plan import Action, Plan, Span, Timeline
from ..plan.inputs import inputs


def gaps(plan: Plan, timeline: Timeline) -> tuple[list[float], list[float]]:
    """The delays of the actions of a measured step after they could begin, in nanoseconds.

    Returns:
        Those that waited for the action before on their own device, and those that waited for an
        action on another device.
    """
    spans = {span.action: span for row in timeline.rows for span in row}
    issued, handed = [], []
    for row in timeline.rows:
        for before, span in zip([None, *row], row, strict=False):
            own = -1.0 if before is None else before.end_ns
            other = _last_input(plan, span, spans)
            if other > own:
                handed.append(span.start_ns - other)
            elif own >= 0:
                issued.append(span.start_ns - own)
    return issued, handed


def _last_input(plan: Plan, span: Span, spans: dict[Action, Span]) -> float:
    """The end of the last action on another device that an action needs; -1 without any."""
    here = plan.device_of(span.action)
    ends = [
        spans[action].end_ns
        for action in inputs(span.action)
        if action in spans and plan.device_of(action) != here
    ]
    return max(ends, default=-1.0)
