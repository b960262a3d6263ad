"""Timelines as a picture: SVG by hand, PNG and PDF by matplotlib, imported when needed."""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pykern._C import Timeline
from pykern.plan.drawing.layout import (
    FOOT_HEIGHT,
    LETTER_HEIGHT,
    MARGIN_LEFT,
    PANEL_WIDTH,
    ROW_HEIGHT,
    TITLE_HEIGHT,
    WIDTH,
    Drawn,
    cells_of,
    legend_of,
)
from pykern.plan.drawing.svg import as_svg
from pykern.plan.drawing.words import (
    clean,
    length_ns,
    measures,
    require_timelines,
    row_names,
    time_unit,
)
from pykern.replacing import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS_PER_INCH = 72
# Without the time and the version of matplotlib, the same timelines make the same file.
UNDATED = {".png": {"Software": None}, ".pdf": {"CreationDate": None, "Producer": None}}


def save_picture(timelines: Mapping[str, Timeline], path: str | os.PathLike[str]) -> None:
    """Draws timelines one under another on one time axis.

    A cell shows "F0" (forward of microbatch 0; "F0.1" is its second slice), or "0" where "F0" does
    not fit. Later chunks and replicas are darker. Two actions that share a slot have half its
    height each. The grey background ends at the makespan. The same timelines make the same file.

    Args:
        timelines: The timelines by label; a label may be any string.
        path: File to write, .png, .pdf or .svg; an existing file is replaced atomically.

    Raises:
        ValueError: There is nothing to draw, or the file is of another kind.
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    require_timelines(timelines)
    write_picture(path, lambda: as_svg(timelines), lambda: draw(timelines))


def write_picture(
    path: str | os.PathLike[str], as_text: Callable[[], str], as_figure: Callable[[], "Figure"]
) -> None:
    """Writes what makes an SVG or a figure, whichever the file's name asks for."""
    target = Path(path)
    match target.suffix.lower():
        case ".svg":
            drawn = as_text()
            with replacing(target) as partial:
                partial.write_text(drawn, encoding="utf-8")
        case ".png" | ".pdf" as form:
            figure = as_figure()
            with replacing(target) as partial:
                figure.savefig(partial, format=form[1:], dpi=150, metadata=UNDATED[form])
        case _:
            raise ValueError(
                f"a picture's file name must end in .png, .pdf or .svg, got {str(path)!r}"
            )


def blank_figure(width: float, height: float) -> "Figure":
    """A white figure of this size in points."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  an extra: imported where it is used
    except ModuleNotFoundError as error:
        raise ImportError(
            "pictures need matplotlib. Install it with pip install pykern-runtime[viz]"
        ) from error
    size = width / POINTS_PER_INCH, height / POINTS_PER_INCH
    return Figure(figsize=size, facecolor="white")


def draw(timelines: Mapping[str, Timeline]) -> "Figure":
    """The whole figure, with a panel for each timeline and one axis of time below the last."""
    heights = [ROW_HEIGHT * timeline.num_devices for timeline in timelines.values()]
    height = sum(heights) + TITLE_HEIGHT * len(heights) + FOOT_HEIGHT
    figure = blank_figure(WIDTH, height)
    longest_ns = max(map(length_ns, timelines.values())) or 1.0
    unit, unit_ns = time_unit(longest_ns)
    bottom = height
    for (label, timeline), panel_height in zip(timelines.items(), heights, strict=True):
        bottom -= TITLE_HEIGHT + panel_height
        box = (MARGIN_LEFT / WIDTH, bottom / height, PANEL_WIDTH / WIDTH, panel_height / height)
        axes = figure.add_axes(box)
        axes.set_xlim(0, longest_ns / unit_ns)
        set_title(axes, label, timeline)
        set_up(axes, timeline, unit_ns)
        draw_cells(axes, list(cells_of(timeline, longest_ns)), unit_ns)
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
    axes.set_ylim(timeline.num_devices - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_devices), row_names(timeline))
    axes.tick_params(left=False, labelbottom=False, color="#999999")
    axes.spines[:].set_visible(False)
    axes.axvspan(0, length_ns(timeline) / unit_ns, color="#efefef", linewidth=0)


def draw_cells(axes: "Axes", cells: list[Drawn], unit_ns: float) -> None:
    """A bar for each cell, with its text."""
    bands: dict[tuple[int, tuple[float, float], float], list[Drawn]] = defaultdict(list)
    for cell in cells:
        bands[cell.device, cell.band, cell.border].append(cell)
    for (device, (middle, height), border), alike in bands.items():
        bars = [(cell.start_ns / unit_ns, cell.length_ns / unit_ns) for cell in alike]
        fills = [cell.colours.fill for cell in alike]
        extent = (device + middle - height / 2, height)
        axes.broken_barh(bars, extent, facecolors=fills, edgecolor="white", lw=border)
        for cell, (start, length) in zip(alike, bars, strict=True):
            if cell.text:
                word = axes.text(start + length / 2, device + middle, cell.text)
                word.set(ha="center", va="center_baseline", fontsize=LETTER_HEIGHT)
                word.set_color(cell.colours.ink)


def draw_legend(figure: "Figure", timelines: Mapping[str, Timeline]) -> None:
    """Draws the meaning of the colours below the axis."""
    from matplotlib.patches import Patch  # noqa: PLC0415  an extra: imported where it is used

    patches = [Patch(facecolor=fill, label=name) for fill, name in legend_of(timelines)]
    figure.legend(
        handles=patches,
        loc="lower center",
        ncols=len(patches),
        frameon=False,
        fontsize=9,
        handlelength=1.2,
        columnspacing=1.4,
    )
