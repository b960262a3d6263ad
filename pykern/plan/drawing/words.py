"""The words that all drawings of a timeline share: names, units, labels."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from pykern._C import Action, Kind, Span, Timeline

LONGEST_LABEL = 80
# Widths divided by smaller numbers would not be finite.
SHORTEST_NS = 1e-200
# The most stages that the name of a row of copies lists.
MOST_STAGES = 2

COPIES = (Kind.COPY_F, Kind.COPY_B)

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
        TypeError: The timelines have no names, or are something else, such as plans.
        ValueError: There is no timeline, or none of them holds a span.
    """
    if not isinstance(timelines, Mapping):
        raise TypeError(
            f"timelines must be a dict of timelines by name, got a {type(timelines).__name__}. "
            "Give for example {'measured': timeline}"
        )
    for name, timeline in timelines.items():
        if not isinstance(name, str) or not isinstance(timeline, Timeline):
            raise TypeError(
                "timelines must be a dict of timelines by name, got a "
                f"{type(timeline).__name__} by {name!r}. Draw simulate(plan, costs) for a plan"
            )
    if not any(timeline.kinds for timeline in timelines.values()):
        raise ValueError("timelines must hold at least one with an action in it, got none")


def clean(label: str) -> str:
    """The label on one line, with question marks in place of control characters."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in label)
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 3] + "..."


def time_unit(most_ns: float) -> tuple[str, float]:
    """The unit that writes times up to `most_ns` with few digits, and its nanoseconds."""
    units = [("s", 1e9), ("ms", 1e6), ("us", 1e3)]
    return next((unit for unit in units if most_ns >= unit[1]), ("ns", 1.0))


def holds_copies(timeline: Timeline) -> bool:
    """Whether the rows of the timeline are copy streams, not devices."""
    return any(kind in COPIES for kind in timeline.kinds)


def row_names(timeline: Timeline) -> list[str]:
    """The name of each row: a device, or the copies of F's or B's results of some stages."""
    if not holds_copies(timeline):
        return [f"device {device}" for device in range(timeline.num_devices)]
    return [copies_name(row) for row in timeline.rows]


def copies_name(row: Sequence[Span]) -> str:
    """The name of a copy stream: "F of 0, 2" carries the outputs of F on stages 0 and 2."""
    kinds = sorted({span.action.kind.name.removeprefix("COPY_") for span in row})
    stages = sorted({span.action.stage for span in row})
    shown = [*map(str, stages[:MOST_STAGES]), *["…"][: len(stages) > MOST_STAGES]]
    return f"{'/'.join(kinds)} of {', '.join(shown)}"


def measures(timeline: Timeline) -> str:
    """Makespan and bubble ratio; for copies, their number and the mean time of a copy."""
    if holds_copies(timeline):
        times = [span.end_ns - span.start_ns for row in timeline.rows for span in row]
        unit, unit_ns = time_unit(fmean(times))
        return f"{len(times)} copies, {fmean(times) / unit_ns:.4g} {unit} each on average"
    unit, unit_ns = time_unit(timeline.makespan_ns)
    makespan = timeline.makespan_ns / unit_ns
    return f"makespan {makespan:.4g} {unit}, bubble ratio {timeline.bubble_ratio:.3f}"


def first_start_ns(timeline: Timeline) -> float:
    """The time at which the drawing starts; copies are drawn in the time of their step."""
    if holds_copies(timeline):
        return 0.0
    return timeline.first_start_ns


def length_ns(timeline: Timeline) -> float:
    """The length of the drawing of this timeline, from its start."""
    if holds_copies(timeline):
        return max(span.end_ns for row in timeline.rows for span in row)
    return timeline.makespan_ns


def longest_ns(timelines: Mapping[str, Timeline]) -> float:
    """The length of the longest drawing; 0 if it is too short to be divided into a page."""
    longest = max(map(length_ns, timelines.values()))
    return longest if longest >= SHORTEST_NS else 0.0


def number_of(action: Action) -> str:
    """The microbatch, and the slice of the microbatch if it is not the first slice."""
    return f"{action.microbatch}.{action.slice}" if action.slice else str(action.microbatch)


def kinds_of(timelines: Mapping[str, Timeline]) -> list[Kind]:
    """The kinds that occur, in their usual order."""
    found = {kind for timeline in timelines.values() for kind in timeline.kinds}
    return [kind for kind in Kind if kind in found]


def pair_starts(row: Sequence[Span]) -> set[int]:
    """Positions of the first span of each pair of spans that share their time on one device."""
    starts: set[int] = set()
    for position, (span, after) in enumerate(pairwise(row)):
        together = span.start_ns == after.start_ns < min(span.end_ns, after.end_ns)
        if together and position - 1 not in starts:
            starts.add(position)
    return starts
