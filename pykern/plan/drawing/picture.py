"""Pictures as files: SVG by hand, PNG and PDF by matplotlib, imported when needed."""

import math
import os
from collections.abc import Mapping
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from pykern._C import Timeline
from pykern.plan.drawing.layout import picture_of
from pykern.plan.drawing.shapes import Bars, Picture
from pykern.plan.drawing.svg import svg_of
from pykern.plan.drawing.words import require_timelines
from pykern.replacing import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS_PER_INCH = 72
PIXELS_PER_INCH = 150
# A pixel takes four bytes, and twice as many until the file is written.
MOST_PIXELS = 1 << 29
# Without the time and the version of matplotlib, the same picture makes the same file.
_NO_MATPLOTLIB = "pictures need matplotlib. Install it with pip install pykern-runtime[viz]"
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
        ImportError: The file is not an SVG, and matplotlib is not installed.
        OSError: The file cannot be written.
    """
    require_timelines(timelines)
    write_picture(picture_of(timelines), path)


def write_picture(picture: Picture, path: str | os.PathLike[str]) -> None:
    """Writes the picture in the form that the file's name asks for: see `save_picture`."""
    target = Path(path)
    form = require_form(target)
    if form == ".svg":
        with replacing(target) as partial:
            partial.write_text(svg_of(picture), encoding="utf-8")
        return
    if form == ".png":
        require_size(picture)
    # Where a file cannot be written, matplotlib's own clean-up fails with another error.
    drawn = BytesIO()
    as_figure(picture).savefig(drawn, format=form[1:], dpi=PIXELS_PER_INCH, metadata=UNDATED[form])
    with replacing(target) as partial:
        partial.write_bytes(drawn.getbuffer())


def require_form(path: Path) -> str:
    """The form of a picture that a file's name asks for, such as ".svg".

    Raises:
        ValueError: The name has another ending.
        ImportError: The form needs matplotlib, which is not installed.
    """
    form = path.suffix.lower()
    if form not in (".svg", *UNDATED):
        raise ValueError(f"a picture's file name must end in .png, .pdf or .svg, got {str(path)!r}")
    if form != ".svg" and find_spec("matplotlib") is None:
        raise ImportError(_NO_MATPLOTLIB)
    return form


def require_size(picture: Picture) -> None:
    """Refuses a picture whose pixels would take gigabytes.

    Raises:
        ValueError: It has more than `MOST_PIXELS`.
    """
    pixels = [side * PIXELS_PER_INCH / POINTS_PER_INCH for side in picture[:2]]
    if math.prod(pixels) > MOST_PIXELS:
        wide, high = map(int, pixels)
        raise ValueError(
            f"a .png must have at most {MOST_PIXELS} pixels, got {wide} x {high}. Write an .svg"
        )


def as_figure(picture: Picture) -> "Figure":
    """The picture by matplotlib."""
    try:
        # An extra: imported where it is used.
        from matplotlib.collections import PolyCollection  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ImportError(_NO_MATPLOTLIB) from error
    width, height, parts = picture
    figure = Figure((width / POINTS_PER_INCH, height / POINTS_PER_INCH), facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for part in parts:
        if isinstance(part, Bars):
            corners = [
                [(x, y), (x + wide, y), (x + wide, y + high), (x, y + high)]
                for x, y, wide, high in part.rectangles
            ]
            drawn = PolyCollection(corners, facecolor=part.fill, edgecolor="white", lw=part.border)
            axes.add_collection(drawn, autolim=False)
            continue
        for x, y, content in part.texts:
            word = axes.text(x, y, content, ha=part.side, fontsize=part.size, color=part.ink)
            word.set_fontweight(part.weight)
            # A dollar sign starts no formula.
            word.set_parse_math(False)
    return figure
