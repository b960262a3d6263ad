"""Timelines as a picture, PNG or SVG. matplotlib is imported when the first one is drawn."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pykern._C import Kind, Span, Timeline
from pykern.plan.drawing.colours import colours_of
from pykern.plan.drawing.words import (
    chunk_of_stage,
    clean,
    first_start_ns,
    measures,
    require_timelines,
    time_unit,
)
from pykern.plan.replacing import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")

# In inches.
WIDTH = 12.0
MARGIN_LEFT = 0.85
PANEL_WIDTH = WIDTH - MARGIN_LEFT - 0.25
ROW_HEIGHT = 0.36
TITLE_HEIGHT = 0.48
FOOT_HEIGHT = 0.95

# In points.
LETTER_HEIGHT = 8.0
LETTER_WIDTH = 0.62 * LETTER_HEIGHT


def save_picture(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Draws timelines one under another on one time axis.

    A cell shows "F0" (forward, microbatch) or "0" where that fits; later chunks are darker. The
    grey ground ends at the makespan.

    Args:
        timelines: By label. A label may hold anything.
        path: File to write, .png or .svg; an existing one is replaced at once or not at all.

    Raises:
        ValueError: There is nothing to draw, or the file is of another kind.
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    require_timelines(timelines)
    target = Path(path)
    kind = target.suffix.lower().removeprefix(".")
    if kind not in FORMATS:
        raise ValueError(f"a picture's file name must end in .png or .svg, got {str(path)!r}")
    figure = draw(timelines)
    with replacing(target) as partial:
        figure.savefig(partial, format=kind, dpi=150)


def draw(timelines: Mapping[str, Timeline]) -> "Figure":
    """The whole figure, with a panel for each timeline and one axis of time below the last."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  an extra: imported where it is used
    except ModuleNotFoundError as error:
        raise ImportError("pictures need matplotlib: pip install pykern-runtime[viz]") from error
    heights = [ROW_HEIGHT * timeline.num_devices for timeline in timelines.values()]
    height = sum(heights) + TITLE_HEIGHT * len(heights) + FOOT_HEIGHT
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    longest_ns = max(timeline.makespan_ns for timeline in timelines.values()) or 1.0
    unit, unit_ns = time_unit(longest_ns)
    bottom = height
    for (label, timeline), panel_height in zip(timelines.items(), heights, strict=True):
        bottom -= TITLE_HEIGHT + panel_height
        box = (MARGIN_LEFT / WIDTH, bottom / height, PANEL_WIDTH / WIDTH, panel_height / height)
        axes = figure.add_axes(box)
        axes.set_xlim(0, longest_ns / unit_ns)
        set_title(axes, label, timeline)
        set_up(axes, timeline, unit_ns)
        draw_cells(axes, timeline, unit_ns, points_per_ns=72 * PANEL_WIDTH / longest_ns)
    figure.axes[-1].tick_params(labelbottom=True)
    figure.axes[-1].set_xlabel(f"time [{unit}]")
    draw_legend(figure, timelines)
    return figure


def set_title(axes: "Axes", label: str, timeline: Timeline) -> None:
    """The label and the measures; a dollar sign in a label starts no formula."""
    name = axes.set_title(clean(label), loc="left", fontsize=11, fontweight="bold")
    name.set_parse_math(False)
    axes.set_title(measures(timeline), loc="right", fontsize=10, color="#444444")


def set_up(axes: "Axes", timeline: Timeline, unit_ns: float) -> None:
    """A panel without cells: device 0 at the top, grey as far as the makespan."""
    names = [f"device {device}" for device in range(timeline.num_devices)]
    axes.set_ylim(timeline.num_devices - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_devices), names)
    axes.tick_params(left=False, labelbottom=False, color="#999999")
    axes.spines[:].set_visible(False)
    axes.axvspan(0, timeline.makespan_ns / unit_ns, color="#efefef", linewidth=0)


def draw_cells(axes: "Axes", timeline: Timeline, unit_ns: float, points_per_ns: float) -> None:
    """A bar for each span, with its text where that fits."""
    origin_ns = first_start_ns(timeline)
    chunks = chunk_of_stage(timeline)
    num_chunks = max(chunks.values(), default=0) + 1
    for device, row in enumerate(timeline.rows):
        colours = [colours_of(s.action.kind, chunks[s.action.stage], num_chunks) for s in row]
        bars = [
            ((s.start_ns - origin_ns) / unit_ns, (s.end_ns - s.start_ns) / unit_ns) for s in row
        ]
        fills = [colour.fill for colour in colours]
        axes.broken_barh(bars, (device - 0.44, 0.88), facecolors=fills, edgecolor="white", lw=0.6)
        for span, (start, length), colour in zip(row, bars, colours, strict=True):
            if text := cell_text(span, points_per_ns):
                cell = axes.text(start + length / 2, device, text, color=colour.ink)
                cell.set(ha="center", va="center_baseline", fontsize=LETTER_HEIGHT)


def cell_text(span: Span, points_per_ns: float) -> str:
    """The kind and microbatch, the microbatch alone, or nothing: what fits in the cell."""
    width = (span.end_ns - span.start_ns) * points_per_ns
    number = str(span.action.microbatch)
    texts = (span.action.kind.name + number, number)
    return next((text for text in texts if (len(text) + 0.5) * LETTER_WIDTH < width), "")


def draw_legend(figure: "Figure", timelines: Mapping[str, Timeline]) -> None:
    """Forward and backward in the first and the last chunk's colours, below the axis."""
    from matplotlib.patches import Patch  # noqa: PLC0415  an extra: imported where it is used

    last = max(max(chunk_of_stage(timeline).values(), default=0) for timeline in timelines.values())
    names = {0: ", first chunk", last: ", last chunk"} if last > 0 else {0: ""}
    patches = [
        Patch(facecolor=colours_of(kind, chunk, last + 1).fill, label=kind_name + chunk_name)
        for kind, kind_name in ((Kind.F, "forward"), (Kind.B, "backward"))
        for chunk, chunk_name in names.items()
    ]
    figure.legend(handles=patches, loc="lower center", ncols=len(patches), frameon=False)
