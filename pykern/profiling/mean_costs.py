"""The costs of stages, from the timeline of a step that ran."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean

from ..plan import Costs, Kind, Span, Timeline


def mean_costs(timeline: Timeline, copies: Timeline, num_stages: int) -> Costs:
    """The mean time by stage and kind, NaN if it did not run; and of copies, 0 without copies."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in spans_of(timeline):
        times[span.action.kind, span.action.stage].append(span.end_ns - span.start_ns)
    crossings: dict[int, list[float]] = defaultdict(list)
    for span in spans_of(copies):
        # The boundary behind a stage, which a gradient crosses from the other side.
        back = span.action.kind == Kind.COPY_B
        crossings[span.action.stage - back].append(span.end_ns - span.start_ns)

    def means(kind: Kind) -> list[float]:
        return [_mean(times[kind, stage], math.nan) for stage in range(num_stages)]

    inputs, weights = means(Kind.I), means(Kind.W)
    halves = [i + w for i, w in zip(inputs, weights, strict=True)]
    # As many bytes as nanoseconds, because a cost has one bandwidth for all boundaries.
    return Costs(
        means(Kind.F),
        [_mean(times[Kind.B, stage], both) for stage, both in enumerate(halves)],
        recompute_ns=means(Kind.R),
        input_ns=inputs,
        weight_ns=weights,
        update_ns=means(Kind.U),
        reduce_ns=means(Kind.REDUCE),
        message_bytes=[_mean(crossings[stage], 0.0) for stage in range(num_stages)],
        bandwidth=1.0,
    )


def spans_of(timeline: Timeline) -> Iterator[Span]:
    """All spans of a timeline, row by row."""
    return (span for row in timeline.rows for span in row)


def _mean(times: list[float], otherwise: float) -> float:
    return fmean(times) if times else otherwise
