"""What a step has cost, in the form in which the planner takes costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from ..plan import Costs, Kind, Span, Timeline


def mean_costs(timeline: Timeline, copies: Timeline, num_stages: int) -> Costs:
    """The mean time of each stage by kind, and of copies; 0 where there are none.

    Args:
        timeline: of a step.
        copies: of the same.
        num_stages: of its plan.
    """
    kinds = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)
    times: dict[Kind, list[list[float]]] = {kind: [[] for _ in range(num_stages)] for kind in kinds}
    for span in _spans(timeline):
        if span.action.kind in times:
            of_stage = times[span.action.kind][span.action.stage]
            of_stage.append(span.end_ns - span.start_ns)
    crossings: list[list[float]] = [[] for _ in range(num_stages)]
    for span in _spans(copies):
        # The boundary behind a stage, which a gradient crosses from the other side.
        back = span.action.kind == Kind.COPY_B
        crossings[span.action.stage - back].append(span.end_ns - span.start_ns)
    forward, recompute, backward, inputs, weights = (_means(times[kind]) for kind in kinds)
    # As many bytes as nanoseconds, because a cost has one bandwidth for all boundaries.
    return Costs(
        forward,
        backward,
        recompute_ns=recompute,
        input_ns=inputs,
        weight_ns=weights,
        message_bytes=_means(crossings),
        bandwidth=1.0,
    )


def _spans(timeline: Timeline) -> Iterator[Span]:
    return (span for row in timeline.rows for span in row)


def _means(times: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(of_stage) if of_stage else 0.0 for of_stage in times]
