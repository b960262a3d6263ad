"""Timelines as a picture: a panel for each, and one axis of time below the last."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import log10

from pykern._C import Shades, Span, Timeline
from pykern.plan.drawing.colours import colours_of
from pykern.plan.drawing.shapes import Bars, Picture, Words
from pykern.plan.drawing.words import (
    KIND_NAMES,
    clean,
    first_start_ns,
    kinds_of,
    length_ns,
    longest_ns,
    measures,
    number_of,
    pair_starts,
    row_names,
    time_unit,
)

# In points, 72 to an inch.
WIDTH = 864.0
MARGIN_LEFT = 62.0
PANEL_WIDTH = WIDTH - MARGIN_LEFT - 18.0
ROW_HEIGHT = 26.0
TITLE_HEIGHT = 34.0
FOOT_HEIGHT = 68.0
# The width of an action that takes no time.
THIN_WIDTH = 2.0
LETTER_HEIGHT = 8.0
LETTER_WIDTH = 0.62 * LETTER_HEIGHT
LEGEND_LETTER_WIDTH = 5.4
FEWEST_TICKS = 4

# White lines around bars, by the least width of a bar that has them: narrow bars would be hidden.
BORDERS = ((4.0, 0.6), (1.5, 0.2))

# Middle and height of a bar as a share of its row: alone, or one of two that share a slot.
WHOLE = (0.0, 0.88)
UPPER = (-0.22, 0.44)
LOWER = (0.22, 0.44)


def picture_of(timelines: Mapping[str, Timeline]) -> Picture:
    """The whole picture."""
    whole_ns = longest_ns(timelines) or 1.0
    parts: list[Bars | Words] = []
    top = 0.0
    for label, timeline in timelines.items():
        top += TITLE_HEIGHT
        parts += panel(label, timeline, top, PANEL_WIDTH / whole_ns)
        top += timeline.num_devices * ROW_HEIGHT
    height = top + FOOT_HEIGHT
    parts += [*axis(whole_ns, top), *legend(timelines, height - 14)]
    return Picture(WIDTH, height, parts)


def panel(label: str, timeline: Timeline, top: float, scale: float) -> Iterator[Bars | Words]:
    """One timeline: title, measures, and rows from the top on grey that ends with the timeline."""
    right = MARGIN_LEFT + PANEL_WIDTH
    yield Words([(MARGIN_LEFT, top - 7, clean(label))], size=11, weight="bold")
    yield Words([(right, top - 7, measures(timeline))], "right", ink="#444444")
    height = timeline.num_devices * ROW_HEIGHT
    yield Bars([(MARGIN_LEFT, top, length_ns(timeline) * scale, height)], "#efefef")
    names = [
        (MARGIN_LEFT - 8, top + (row + 0.5) * ROW_HEIGHT + 3.5, name)
        for row, name in enumerate(row_names(timeline))
    ]
    yield Words(names, "right")
    yield from cells(timeline, top, scale)


def cells(timeline: Timeline, top: float, scale: float) -> Iterator[Bars | Words]:
    """The spans: bars by colour and border, and texts by colour."""
    bars, texts = defaultdict(list), defaultdict(list)
    origin_ns = first_start_ns(timeline)
    shades = Shades(timeline)
    for device, row in enumerate(timeline.rows):
        starts = pair_starts(row)
        for position, span in enumerate(row):
            middle, share = (
                UPPER if position in starts else LOWER if position - 1 in starts else WHOLE
            )
            x = MARGIN_LEFT + (span.start_ns - origin_ns) * scale
            y = top + (device + 0.5 + middle) * ROW_HEIGHT
            width = (span.end_ns - span.start_ns) * scale or THIN_WIDTH
            height = share * ROW_HEIGHT
            shade = shades.shade_of(device, span.action)
            fill, ink = colours_of(span.action.kind, shade, shades.num_shades)
            border = next((border for least, border in BORDERS if width >= least), 0.0)
            bars[fill, border].append((x, y - height / 2, width, height))
            if text := cell_text(span, width):
                texts[ink].append((x + width / 2, y + 3, text))
    for (fill, border), rectangles in bars.items():
        yield Bars(rectangles, fill, border)
    for ink, placed in texts.items():
        yield Words(placed, "center", LETTER_HEIGHT, ink)


def cell_text(span: Span, width: float) -> str:
    """The longest text that fits: kind, microbatch and slice; without the kind; or nothing."""
    number = number_of(span.action)
    texts = (span.action.kind.name + number, number)
    return next((text for text in texts if (len(text) + 0.5) * LETTER_WIDTH < width), "")


def axis(whole_ns: float, top: float) -> Iterator[Bars | Words]:
    """Round times below the last panel."""
    unit, unit_ns = time_unit(whole_ns)
    longest = whole_ns / unit_ns
    step = round_step(longest / FEWEST_TICKS)
    texts = []
    for tick in range(int(longest / step) + 1):
        x = MARGIN_LEFT + tick * step / longest * PANEL_WIDTH
        yield Bars([(x - 0.5, top, 1, 4)], "#999999")
        texts.append((x, top + 15, f"{tick * step:g}"))
    texts.append((MARGIN_LEFT + PANEL_WIDTH / 2, top + 29, f"time [{unit}]"))
    yield Words(texts, "center")


def round_step(largest: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten up to this."""
    power = 10.0 ** int(log10(largest) // 1)
    return next(power * factor for factor in (5, 2, 1) if power * factor <= largest * 1.000001)


def legend(timelines: Mapping[str, Timeline], y: float) -> Iterator[Bars | Words]:
    """The meaning of the colours, on one line, centred."""
    entries = legend_of(timelines)
    widths = [30 + LEGEND_LETTER_WIDTH * len(name) for _, name in entries]
    x = (WIDTH - sum(widths)) / 2
    for (fill, name), width in zip(entries, widths, strict=True):
        yield Bars([(x, y - 8, 12, 9)], fill)
        yield Words([(x + 16, y, name)])
        x += width


def legend_of(timelines: Mapping[str, Timeline]) -> list[tuple[str, str]]:
    """The kinds with their lightest colours, then the first kind's darkest for later ones."""
    all_shades = [Shades(timeline) for timeline in timelines.values()]
    num_shades = max(shades.num_shades for shades in all_shades)
    kinds = kinds_of(timelines)
    entries = [(colours_of(kind, 0, num_shades).fill, KIND_NAMES[kind]) for kind in kinds]
    several = {
        "chunks": max(shades.num_chunks for shades in all_shades) > 1,
        "replicas": max(shades.num_replicas for shades in all_shades) > 1,
    }
    if darker := [name for name, there in several.items() if there]:
        darkest = colours_of(kinds[0], num_shades - 1, num_shades).fill
        entries.append((darkest, f"darker: later {' and '.join(darker)}"))
    return entries
