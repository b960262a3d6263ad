"""What every drawing says about a timeline in words."""

from collections.abc import Mapping

from pykern._C import Timeline

LONGEST_LABEL = 80


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


def chunk_of_stage(timeline: Timeline) -> dict[int, int]:
    """Which chunk of its device each stage is, counted from the input."""
    chunks = {}
    for row in timeline.rows:
        stages = sorted({span.action.stage for span in row})
        chunks.update({stage: chunk for chunk, stage in enumerate(stages)})
    return chunks
