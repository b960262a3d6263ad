"""The links of a box as a picture: a square of bandwidths."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product

from .._C import Kind
from ..plan.drawing.colours import Colours, colours_of
from ..plan.drawing.picture import write_picture
from ..plan.drawing.shapes import Bars, Picture, Words
from ..plan.drawing.words import clean
from .box import Box

# In points, 72 to an inch.
CELL = 52.0
LEFT, TOP, EDGE = 62.0, 62.0, 14.0
LETTER_WIDTH = 6.4
NUM_SHADES = 100
INK = "#1a1a1a"
NO_LINK = Colours("#efefef", INK)


def save_heat_map(box: Box, path: str | os.PathLike[str]) -> None:
    """Draws bandwidth, one way, and latency between each two devices of a box.

    The darkest cell has the fastest link, a grey one no link. The title says whether the figures
    are measured or published. The same box makes the same file.

    Args:
        box: The box.
        path: File to write, .png, .pdf or .svg; an existing file is replaced atomically.

    Raises:
        ValueError: The file is of another kind.
        ImportError: The file is not an SVG, and matplotlib is not installed.
        OSError: The file cannot be written.
    """
    titles = clean(box.name), f"GB/s one way, and latency, between two devices; {box.basis}"
    square = CELL * len(box.devices)
    width = max(LEFT + square, LETTER_WIDTH * max(map(len, titles))) + EDGE
    middles = [(device + 0.5) * CELL for device in range(len(box.devices))]
    parts = [
        Words([(EDGE, 20, titles[0])], ink=INK, weight="bold"),
        Words([(EDGE, 35, titles[1])], ink=INK),
        Words([(LEFT + x, TOP - 6, f"{n}") for n, x in enumerate(middles)], "center", ink=INK),
        Words(
            [(LEFT - 8, TOP + y + 3.5, f"device {n}") for n, y in enumerate(middles)],
            "right",
            ink=INK,
        ),
        *_squares(box),
    ]
    write_picture(Picture(width, TOP + square + EDGE, parts), path)


def _squares(box: Box) -> Iterator[Bars | Words]:
    """A square for each two devices, with the lines of its text."""
    fastest = max((link.bytes_per_ns for link in box.links), default=1.0)
    for row, column in product(range(len(box.devices)), repeat=2):
        link = None if row == column else box.link(row, column)
        colours = NO_LINK
        lines: tuple[str, ...] = () if row == column else ("no link",)
        if link is not None:
            shade = round((NUM_SHADES - 1) * link.bytes_per_ns / fastest)
            colours = colours_of(Kind.F, shade, NUM_SHADES)
            lines = _short(link.bytes_per_ns), f"{_short(link.latency_ns / 1e3)} µs"
        x, y = LEFT + column * CELL, TOP + row * CELL
        yield Bars([(x, y, CELL, CELL)], colours.fill, 1.0)
        first = y + CELL / 2 + 4 - 6 * (len(lines) - 1)
        texts = [(x + CELL / 2, first + 12 * number, line) for number, line in enumerate(lines)]
        yield Words(texts, "center", ink=colours.ink)


def _short(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1}f}"
