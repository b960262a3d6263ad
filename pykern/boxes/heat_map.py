"""The links of a box as a picture: a square of bandwidths, as SVG or by matplotlib."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from .._C import Kind
from ..plan.drawing.colours import Colours, colours_of
from ..plan.drawing.picture import blank_figure, write_picture
from ..plan.drawing.svg import bar, number, text
from ..plan.drawing.words import clean
from .box import Box

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# In points, 72 to an inch.
CELL = 52.0
LEFT, TOP, EDGE = 62.0, 62.0, 14.0
LETTER_WIDTH = 6.4
NUM_SHADES = 100
INK = "#1a1a1a"
NO_LINK = Colours("#efefef", INK)


class Square(NamedTuple):
    """A square from its upper left corner on, with the lines of its text."""

    x: float
    y: float
    colours: Colours
    lines: tuple[str, ...]


class Words(NamedTuple):
    """A text that starts, ends or is centred at a place."""

    x: float
    y: float
    text: str
    anchor: Literal["start", "middle", "end"] = "start"
    ink: str = INK
    weight: Literal["normal", "bold"] = "normal"


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
    write_picture(path, lambda: _as_svg(box), lambda: _as_figure(box))


def _squares(box: Box) -> Iterator[Square]:
    fastest = max((link.bytes_per_ns for link in box.links), default=1.0)
    for row in range(len(box.devices)):
        for column in range(len(box.devices)):
            link = None if row == column else box.link(row, column)
            colours = NO_LINK
            lines: tuple[str, ...] = () if row == column else ("no link",)
            if link is not None:
                shade = round((NUM_SHADES - 1) * link.bytes_per_ns / fastest)
                colours = colours_of(Kind.F, shade, NUM_SHADES)
                lines = _short(link.bytes_per_ns), f"{_short(link.latency_ns / 1e3)} µs"
            yield Square(LEFT + column * CELL, TOP + row * CELL, colours, lines)


def _short(value: float) -> str:
    return f"{value:.{0 if value >= 100 else 1}f}"


def _words(box: Box) -> Iterator[Words]:
    """All texts."""
    name, basis = _titles(box)
    yield Words(EDGE, 20, name, weight="bold")
    yield Words(EDGE, 35, basis)
    for device in range(len(box.devices)):
        middle = (device + 0.5) * CELL
        yield Words(LEFT + middle, TOP - 6, f"{device}", "middle")
        yield Words(LEFT - 8, TOP + middle + 3.5, f"device {device}", "end")
    for square in _squares(box):
        first = square.y + CELL / 2 + 4 - 6 * (len(square.lines) - 1)
        for number_of_line, line in enumerate(square.lines):
            y = first + 12 * number_of_line
            yield Words(square.x + CELL / 2, y, line, "middle", square.colours.ink)


def _titles(box: Box) -> tuple[str, str]:
    return clean(box.name), f"GB/s one way, and latency, between two devices; {box.basis}"


def _size(box: Box) -> tuple[float, float]:
    """Width and height."""
    square = CELL * len(box.devices)
    letters = max(map(len, _titles(box)))
    return max(LEFT + square, LETTER_WIDTH * letters) + EDGE, TOP + square + EDGE


def _as_svg(box: Box) -> str:
    width, height = map(number, _size(box))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for square in _squares(box):
        shape = bar(square.x, square.y, CELL, CELL)
        lines.append(f'<path fill="{square.colours.fill}" stroke="#fff" d="{shape}"/>')
    for words in _words(box):
        more = f' text-anchor="{words.anchor}" font-weight="{words.weight}" fill="{words.ink}"'
        lines.append(text(words.x, words.y, words.text, more))
    return "\n".join([*lines, "</svg>\n"])


def _as_figure(box: Box) -> Figure:
    width, height = _size(box)
    figure = blank_figure(width, height)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    for square in _squares(box):
        extent = (square.y, CELL)
        axes.broken_barh(
            [(square.x, CELL)], extent, facecolors=square.colours.fill, edgecolor="white"
        )
    sides = {"start": "left", "middle": "center", "end": "right"}
    for words in _words(box):
        drawn = axes.text(words.x, words.y, words.text, ha=sides[words.anchor], fontsize=10)
        drawn.set(color=words.ink, weight=words.weight)
        drawn.set_parse_math(False)
    return figure
