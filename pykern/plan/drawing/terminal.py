"""Timelines as text: a line for each device, colours where the terminal has them."""

from collections.abc import Mapping
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from rich.text import Text

from pykern._C import Action, Kind, Shades, Span, Timeline
from pykern.plan.drawing.colours import colours_of
from pykern.plan.drawing.words import (
    KIND_NAMES,
    clean,
    first_start_ns,
    kinds_of,
    longest_ns,
    measures,
    number_of,
    pair_starts,
    require_timelines,
    row_names,
)

# These characters fill a cell behind its text, so that kinds can be told apart without colour.
FILLS = {Kind.F: "-", Kind.B: "=", Kind.I: ":", Kind.W: "+", Kind.R: "."}
OTHER_FILL = "~"

FEWEST_COLUMNS = 16
# A drawing of more devices than this shows half as many of the first and half of the last.
MOST_LINES = 128


class Columns(NamedTuple):
    """An action in the columns [first, last) of its device's line; whether it takes time."""

    action: Action
    first: int
    last: int
    timed: bool


def as_text(timelines: Mapping[str, Timeline], width: int = 100) -> Text:
    """Draws timelines one under another on one time scale.

    A cell shows "2F0" (stage, forward, microbatch) if this fits in all cells of its timeline, else
    "F0" or "F"; so either all cells start with a letter or all start with a number. Two actions
    that share a slot have one half of it each, one after the other. If there are very many
    devices, only the first and the last are drawn; a line between them gives the number left out.

    Args:
        timelines: The timelines by label; a label may be any string.
        width: Columns of the terminal.

    Returns:
        Text for rich's console; its `plain` is the drawing without colour.

    Raises:
        ValueError: There is nothing to draw.
    """
    require_timelines(timelines)
    whole_ns = longest_ns(timelines)
    names = {label: row_names(timeline) for label, timeline in timelines.items()}
    shown = {label: shown_rows(len(of_rows)) for label, of_rows in names.items()}
    head = max(len(names[label][row]) for label in names for row in shown[label]) + len(" |")
    columns = max(width - head - 1, FEWEST_COLUMNS)
    columns_per_ns = columns / whole_ns if whole_ns else 0.0
    text = Text(no_wrap=True, overflow="crop")
    for label, timeline in timelines.items():
        text.append(clean(label), style="bold").append(f"  {measures(timeline)}\n")
        rows = shown[label]
        lines = lines_of(timeline, rows, columns, columns_per_ns)
        for place, (row, line) in enumerate(zip(rows, lines, strict=True)):
            if left_out := row - rows[place - 1] - 1 if place else 0:
                text.append(f"... {left_out} more of {len(names[label])} devices ...\n")
            text.append(f"{names[label][row]} ".ljust(head - 1) + "|").append_text(line)
            text.append("|\n")
    return text.append(legend(timelines), style="dim")


def fitting_width(timelines: Mapping[str, Timeline], width: int) -> float:
    """The width from which all cells that `as_text` draws have room for their microbatches."""
    whole_ns = longest_ns(timelines)
    columns_per_ns = width / whole_ns if whole_ns else 0.0
    head = max(len(name) for timeline in timelines.values() for name in row_names(timeline))
    letters = (
        len(span.action.kind.name + number_of(span.action))
        * (whole_ns / (span.end_ns - span.start_ns))
        for timeline in timelines.values()
        for device in shown_rows(timeline.num_devices)
        for span in timeline.visible(device, first_start_ns(timeline), columns_per_ns)
        if span.end_ns > span.start_ns
    )
    return max(letters, default=0.0) + head + len(" ||")


def legend(timelines: Mapping[str, Timeline]) -> str:
    """The meaning of the letters and of the characters that fill their cells."""
    kinds = kinds_of(timelines)
    words = [
        f"{kind.name[0]}{FILLS.get(kind, OTHER_FILL) * 2} {KIND_NAMES[kind]}" for kind in kinds
    ]
    return "   ".join([*words, "blank: idle"])


def shown_rows(num_rows: int) -> list[int]:
    """The rows that get a line."""
    if num_rows <= MOST_LINES:
        return list(range(num_rows))
    half = MOST_LINES // 2
    return [*range(half), *range(num_rows - half, num_rows)]


def lines_of(
    timeline: Timeline, shown: list[int], columns: int, columns_per_ns: float
) -> list[Text]:
    """The cells of these devices, without their names."""
    origin_ns = first_start_ns(timeline)
    shades = Shades(timeline)

    def cell_of(span: Span) -> Columns:
        first = min(int((span.start_ns - origin_ns) * columns_per_ns), columns - 1)
        last = int((span.end_ns - origin_ns) * columns_per_ns)
        timed = span.end_ns > span.start_ns
        return Columns(span.action, first, min(max(last, first + 1), columns), timed)

    spans = [timeline.visible(device, origin_ns, columns_per_ns) for device in shown]
    rows = [halved([cell_of(span) for span in row], pair_starts(row)) for row in spans]
    cells = [cell for row in rows for cell in row if cell.timed]
    with_stage = all(len(str(cell.action)) < cell.last - cell.first for cell in cells)

    def line_of(device: int, row: list[Columns]) -> Text:
        styled = [(" ", "")] * columns
        for cell in row:
            shade = shades.shade_of(device, cell.action)
            fill, ink = colours_of(cell.action.kind, shade, shades.num_shades)
            letters = cell_text(cell.action, cell.last - cell.first, with_stage and cell.timed)
            styled[cell.first : cell.last] = [(letter, f"{ink} on {fill}") for letter in letters]
        runs = groupby(styled, key=itemgetter(1))
        return Text.assemble(
            *(("".join(letter for letter, _ in run), style) for style, run in runs)
        )

    return [line_of(device, row) for device, row in zip(shown, rows, strict=True)]


def halved(row: list[Columns], starts: set[int]) -> list[Columns]:
    """The row with the cells of each pair side by side, where there is room for both cells."""
    cells = list(row)
    for start in starts:
        first, second = cells[start : start + 2]
        middle = (first.first + first.last) // 2
        if middle > first.first:
            cells[start] = first._replace(last=middle)
            cells[start + 1] = second._replace(first=middle)
    return cells


def cell_text(action: Action, width: int, with_stage: bool) -> str:
    """The action, or as much of it as fits without its stage, filled up to the width."""
    kind = action.kind.name
    short = kind + number_of(action)
    text = str(action) if with_stage else short if len(short) <= width else kind[0]
    return text[:width].ljust(width, FILLS.get(action.kind, OTHER_FILL))
