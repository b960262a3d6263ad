"""Files of boxes as a page: a table in Markdown, and a picture of bars."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..plan.drawing.shapes import Bars, Picture, Words
from .figures import BoxResults, Figure

# Lengths of the picture, in points.
_WIDTH, _LEFT, _RIGHT = 864.0, 330.0, 90.0
_HEAD, _TITLE, _BAR, _GAP, _FOOT = 34.0, 17.0, 11.0, 8.0, 12.0
_FILLS = "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"
_INK, _PREDICTED = "#222222", "#000000"
MOST_BOXES = len(_FILLS)


def as_markdown(boxes: Sequence[tuple[str, BoxResults]]) -> str:
    """A list of the facts of each box, and a table with a column for each.

    A cell has the median, in parentheses the 20th and the 80th percentile, and what was predicted.

    Args:
        boxes: one or more, with a name for each.
    """
    lines = [line for name, box in boxes for line in _facts(name, box)]
    lines += ["", _row(["figure", "unit", *(name for name, _ in boxes)])]
    lines.append(_row(["---"] * (len(boxes) + 2)))
    for name, unit in _names([box for _, box in boxes]):
        cells = [_cell(_figure(box, name)) for _, box in boxes]
        lines.append(_row([name, unit, *cells]))
    return "\n".join(lines) + "\n"


def picture_of_boxes(boxes: Sequence[tuple[str, BoxResults]]) -> Picture:
    """A group of bars for each figure, a bar for each box, and a mark where one was predicted.

    Bars of a unit are in proportion to the longest of them. A box has one colour.

    Args:
        boxes: as for `as_markdown`, at most MOST_BOXES.
    """
    parts: list[Bars | Words] = []
    for number, (name, _) in enumerate(boxes):
        x = 12 + number * (_WIDTH - 24) / MOST_BOXES
        parts += [Bars([(x, 9, 12, 9)], _FILLS[number]), Words([(x + 16, 18, name)], ink=_INK)]
    top, longest = _HEAD, _longest([box for _, box in boxes])
    for name, unit in _names([box for _, box in boxes]):
        parts.append(Words([(_LEFT - 8, top + 8, name)], "right", ink=_INK))
        scale = (_WIDTH - _LEFT - _RIGHT) / longest[unit]
        parts += _group([_figure(box, name) for _, box in boxes], top, scale)
        top += len(boxes) * _BAR + _GAP
    return Picture(_WIDTH, top + _FOOT, parts)


def _longest(boxes: Sequence[BoxResults]) -> dict[str, float]:
    """By unit, the longest time of a bar or a mark."""
    longest: dict[str, float] = {}
    for figure in (figure for box in boxes for figure in box.figures):
        times = (longest.get(figure.unit, 0.0), figure.median, figure.predicted or 0.0)
        longest[figure.unit] = max(times)
    return longest


def _group(figures: Sequence[Figure | None], top: float, scale: float) -> Iterator[Bars | Words]:
    for number, figure in enumerate(figures):
        if figure is None:
            continue
        y = top + number * _BAR
        yield Bars([(_LEFT, y, figure.median * scale, _BAR - 2)], _FILLS[number])
        if figure.predicted is not None:
            yield Bars([(_LEFT + figure.predicted * scale - 1, y - 1, 2, _BAR)], _PREDICTED)
        text = f"{figure.median:.3g} {figure.unit}"
        yield Words([(_WIDTH - _RIGHT + 8, y + _BAR - 3, text)], size=9, ink=_INK)


def _facts(name: str, box: BoxResults) -> Iterator[str]:
    yield f"- **{name}**: {'; '.join(f'{fact} {value}' for fact, value in box.machine.items())}"
    for section, why in box.left_out.items():
        yield f"  - {section} left out: {why}"


def _names(boxes: Sequence[BoxResults]) -> list[tuple[str, str]]:
    """Names and units of all figures, in the order of the first box that has each."""
    return list(
        dict.fromkeys((figure.name, figure.unit) for box in boxes for figure in box.figures)
    )


def _figure(box: BoxResults, name: str) -> Figure | None:
    return next((figure for figure in box.figures if figure.name == name), None)


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return ""
    low, high = figure.interval
    predicted = "" if figure.predicted is None else f", predicted {figure.predicted:.3f}"
    return f"{figure.median:.3f} ({low:.3f} to {high:.3f}){predicted}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
