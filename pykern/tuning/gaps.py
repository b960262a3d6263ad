"""The time between actions of a step: to issue an action, and to hand over to another device."""

from __future__ import annotations

from collections.abc import Iterator

from ..plan import Action, Kind, Plan, Span, Timeline

_GRADIENTS = (Kind.B, Kind.I)


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


def inputs(action: Action) -> Iterator[Action]:
    """The actions of other stages that an action waits for; the plan may lack some of them."""
    if action.kind is Kind.F and action.stage > 0:
        yield Action(Kind.F, action.stage - 1, action.microbatch)
    if action.kind in _GRADIENTS:
        for kind in _GRADIENTS:
            yield Action(kind, action.stage + 1, action.microbatch)
