"""What every drawing says about a timeline in words."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from pykern._C import Action, Kind, Span, Timeline

LONGEST_LABEL = 80

KIND_NAMES = {
    Kind.F: "forward",
    Kind.R: "recompute",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.U: "update",
    Kind.COPY_F: "copy of an output",
    Kind.COPY_B: "copy of a gradient",
    Kind.REDUCE: "sum over replicas",
    Kind.OFFLOAD: "offload",
    Kind.LOAD: "load",
}


def require_timelines(timelines: Mapping[str, Timeline]) -> None:
    """Refuses to draw nothing.

    Raises:
        ValueError: There is no timeline, or none of them holds a span.
    """
    if not any(row for timeline in timelines.values() for row in timeline.rows):
        raise ValueError("a drawing needs at least one timeline with an action in it, got none")


def clean(label: str) -> str:
    """The label on one line, whatever it holds: control characters become question marks."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in label)
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 3] + "..."


def time_unit(longest_ns: float) -> tuple[str, float]:
    """The unit that writes times up to this one with few digits, and its nanoseconds."""
    units = [("s", 1e9), ("ms", 1e6), ("us", 1e3)]
    return next((unit for unit in units if longest_ns >= unit[1]), ("ns", 1.0))


def measures(timeline: Timeline) -> str:
    """Makespan and bubble ratio."""
    unit, unit_ns = time_unit(timeline.makespan_ns)
    makespan = timeline.makespan_ns / unit_ns
    return f"makespan {makespan:.4g} {unit}, bubble ratio {timeline.bubble_ratio:.3f}"


def first_start_ns(timeline: Timeline) -> float:
    """Where the drawing of this timeline starts."""
    return min((row[0].start_ns for row in timeline.rows if row), default=0.0)


def number_of(action: Action) -> str:
    """The microbatch, and which slice of it if not the first."""
    return f"{action.microbatch}.{action.slice}" if action.slice else str(action.microbatch)


def kinds_of(timelines: Mapping[str, Timeline]) -> list[Kind]:
    """The kinds that occur, in their usual order."""
    found = {span.action.kind for line in timelines.values() for row in line.rows for span in row}
    return [kind for kind in Kind if kind in found]


def pair_starts(row: Sequence[Span]) -> set[int]:
    """Positions of the first of every two spans that share their time on one device."""
    starts: set[int] = set()
    for position, (span, after) in enumerate(pairwise(row)):
        together = span.start_ns == after.start_ns < min(span.end_ns, after.end_ns)
        if together and position - 1 not in starts:
            starts.add(position)
    return starts
