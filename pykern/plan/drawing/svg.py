"""Timelines as SVG, by hand: small, the same bytes on every machine, without a library."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from html import escape
from math import log10

from pykern._C import Timeline
from pykern.plan.drawing.layout import (
    FOOT_HEIGHT,
    LETTER_HEIGHT,
    MARGIN_LEFT,
    PANEL_WIDTH,
    ROW_HEIGHT,
    TITLE_HEIGHT,
    WIDTH,
    cells_of,
    legend_of,
)
from pykern.plan.drawing.words import clean, length_ns, measures, row_names, time_unit

LEGEND_LETTER_WIDTH = 5.4
FEWEST_TICKS = 4


def as_svg(timelines: Mapping[str, Timeline]) -> str:
    """The whole picture.

    Args:
        timelines: The timelines by label; a label may be any string.

    Returns:
        A complete SVG document.
    """
    rows = sum(timeline.num_devices for timeline in timelines.values())
    height = rows * ROW_HEIGHT + len(timelines) * TITLE_HEIGHT + FOOT_HEIGHT
    longest_ns = max(map(length_ns, timelines.values())) or 1.0
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {number(WIDTH)} {number(height)}" '
        f'font-family="sans-serif" font-size="{number(LETTER_HEIGHT)}">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    top = 0.0
    for label, timeline in timelines.items():
        top += TITLE_HEIGHT
        lines += panel(label, timeline, top, longest_ns)
        top += timeline.num_devices * ROW_HEIGHT
    lines += [*axis(longest_ns, top), *legend(timelines, height - 14), "</svg>\n"]
    return "\n".join(lines)


def number(value: float) -> str:
    """A coordinate, to a hundredth of a point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, content: str, more: str = "") -> str:
    """A text that ends, starts or is centred at x; the attributes in `more` decide which."""
    # XML cannot hold a lone surrogate, but a label may contain one.
    shown = escape(content.encode("utf-8", "replace").decode("utf-8"), quote=False)
    return f'<text x="{number(x)}" y="{number(y)}"{more}>{shown}</text>'


def panel(label: str, timeline: Timeline, top: float, longest_ns: float) -> Iterator[str]:
    """One timeline: title, measures, and rows from the top on grey that ends with the timeline."""
    right = MARGIN_LEFT + PANEL_WIDTH
    yield text(MARGIN_LEFT, top - 7, clean(label), ' font-size="11" font-weight="bold"')
    more = ' font-size="10" text-anchor="end" fill="#444"'
    yield text(right, top - 7, measures(timeline), more)
    width = length_ns(timeline) / longest_ns * PANEL_WIDTH
    height = timeline.num_devices * ROW_HEIGHT
    yield f'<path fill="#efefef" d="{bar(MARGIN_LEFT, top, width, height)}"/>'
    for number_of_row, name in enumerate(row_names(timeline)):
        middle = top + (number_of_row + 0.5) * ROW_HEIGHT + 3.5
        yield text(MARGIN_LEFT - 8, middle, name, ' font-size="10" text-anchor="end"')
    yield from cells(timeline, top, longest_ns)


def cells(timeline: Timeline, top: float, longest_ns: float) -> Iterator[str]:
    """The spans: one path for all bars of a colour and border, one group for texts of a colour."""
    bars, texts = defaultdict(list), defaultdict(list)
    for cell in cells_of(timeline, longest_ns):
        middle, share = cell.band
        x = MARGIN_LEFT + cell.start_ns / longest_ns * PANEL_WIDTH
        y = top + (cell.device + 0.5 + middle) * ROW_HEIGHT
        width, height = cell.length_ns / longest_ns * PANEL_WIDTH, share * ROW_HEIGHT
        bars[cell.colours.fill, cell.border].append(bar(x, y - height / 2, width, height))
        if cell.text:
            texts[cell.colours.ink].append(text(x + width / 2, y + 3, cell.text))
    for (fill, border), shapes in bars.items():
        around = f' stroke="#fff" stroke-width="{number(border).lstrip("0")}"' if border else ""
        yield f'<path fill="{fill}"{around} d="{"".join(shapes)}"/>'
    for ink, words in texts.items():
        yield f'<g fill="{ink}" text-anchor="middle">{"".join(words)}</g>'


def bar(x: float, y: float, width: float, height: float) -> str:
    """A rectangle as part of a path."""
    wide = number(width)
    return f"M{number(x)} {number(y)}h{wide}v{number(height)}h-{wide}z"


def axis(longest_ns: float, top: float) -> Iterator[str]:
    """Round times below the last panel."""
    unit, unit_ns = time_unit(longest_ns)
    longest = longest_ns / unit_ns
    step = round_step(longest / FEWEST_TICKS)
    for tick in range(int(longest / step) + 1):
        x = MARGIN_LEFT + tick * step / longest * PANEL_WIDTH
        yield f'<path stroke="#999" d="M{number(x)} {number(top)}v4"/>'
        yield text(x, top + 15, f"{tick * step:g}", ' font-size="10" text-anchor="middle"')
    middle = MARGIN_LEFT + PANEL_WIDTH / 2
    yield text(middle, top + 29, f"time [{unit}]", ' font-size="10" text-anchor="middle"')


def round_step(largest: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten up to this."""
    power = 10.0 ** int(log10(largest) // 1)
    return next(power * factor for factor in (5, 2, 1) if power * factor <= largest * 1.000001)


def legend(timelines: Mapping[str, Timeline], y: float) -> Iterator[str]:
    """The meaning of the colours, on one line, centred."""
    entries = legend_of(timelines)
    widths = [30 + LEGEND_LETTER_WIDTH * len(name) for _, name in entries]
    x = (WIDTH - sum(widths)) / 2
    for (fill, name), width in zip(entries, widths, strict=True):
        yield f'<path fill="{fill}" d="{bar(x, y - 8, 12, 9)}"/>'
        yield text(x + 16, y, name, ' font-size="10"')
        x += width
