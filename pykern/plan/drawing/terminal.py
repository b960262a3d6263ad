"""Timelines as text: a line for each device, colours where the terminal has them."""

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter

from rich.text import Text

from pykern._C import Action, Kind, Span, Timeline
from pykern.plan.drawing.colours import colours_of
from pykern.plan.drawing.words import (
    chunk_of_stage,
    clean,
    first_start_ns,
    measures,
    require_timelines,
)

# Fills a cell behind its text, so that kinds can be told apart without colour.
FILLS = {Kind.F: "-", Kind.B: "="}

FEWEST_COLUMNS = 16


def as_text(timelines: Mapping[str, Timeline], width: int = 100) -> Text:
    """Draws timelines one under another on one time scale.

    A cell shows as much of "2F0" (stage, forward, microbatch) as fits: all, "F0", or "F".

    Args:
        timelines: By label. A label may hold anything.
        width: Columns of the terminal.

    Returns:
        Text for rich's console; its `plain` is the drawing without colour.

    Raises:
        ValueError: There is nothing to draw.
    """
    require_timelines(timelines)
    longest_ns = max(timeline.makespan_ns for timeline in timelines.values())
    num_devices = max(timeline.num_devices for timeline in timelines.values())
    head = len(f"device {num_devices - 1} |")
    columns = max(width - head - 1, FEWEST_COLUMNS)
    columns_per_ns = columns / longest_ns if longest_ns > 0 else 0.0
    text = Text(no_wrap=True, overflow="crop")
    for label, timeline in timelines.items():
        text.append(clean(label), style="bold").append(f"  {measures(timeline)}\n")
        for device, line in enumerate(lines_of(timeline, columns, columns_per_ns)):
            text.append(f"device {device} ".ljust(head - 1) + "|").append_text(line).append("|\n")
    return text.append("F-- forward   B== backward   blank: idle", style="dim")


def lines_of(timeline: Timeline, columns: int, columns_per_ns: float) -> list[Text]:
    """Each device's cells, without its name."""
    origin_ns = first_start_ns(timeline)
    chunks = chunk_of_stage(timeline)
    num_chunks = max(chunks.values(), default=0) + 1

    def line_of(row: tuple[Span, ...]) -> Text:
        cells = [(" ", "")] * columns  # letter and style of each column
        for span in row:
            first = min(int((span.start_ns - origin_ns) * columns_per_ns), columns - 1)
            last = max(int((span.end_ns - origin_ns) * columns_per_ns), first + 1)
            fill, ink = colours_of(span.action.kind, chunks[span.action.stage], num_chunks)
            letters = cell_text(span.action, last - first)
            cells[first:last] = [(letter, f"{ink} on {fill}") for letter in letters]
        runs = groupby(cells[:columns], key=itemgetter(1))
        return Text.assemble(
            *(("".join(letter for letter, _ in run), style) for style, run in runs)
        )

    return [line_of(row) for row in timeline.rows]


def cell_text(action: Action, width: int) -> str:
    """What fits of the action, filled up to the width.

    "2F0" leaves a column before the next cell, whose number would run into its own otherwise.
    """
    kind = action.kind.name
    short = f"{kind}{action.microbatch}"
    text = str(action) if len(str(action)) < width else short if len(short) <= width else kind[0]
    return text.ljust(width, FILLS.get(action.kind, "~"))
