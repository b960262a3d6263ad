"""The layout of a picture, the same for SVG and PNG."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pykern._C import Shades, Span, Timeline
from pykern.plan.drawing.colours import Colours, colours_of
from pykern.plan.drawing.words import KIND_NAMES, first_start_ns, kinds_of, number_of, pair_starts

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

# White lines around bars, by the least width of a bar that has them: narrow bars would be hidden.
BORDERS = ((4.0, 0.6), (1.5, 0.2))

# Middle and height of a bar as a share of its row: alone, or one of two that share a slot.
WHOLE = (0.0, 0.88)
UPPER = (-0.22, 0.44)
LOWER = (0.22, 0.44)


class Drawn(NamedTuple):
    """A span as it is drawn: row, part of it, time from the panel's left edge, border and text."""

    device: int
    band: tuple[float, float]
    start_ns: float
    length_ns: float
    colours: Colours
    border: float
    text: str


def cells_of(timeline: Timeline, longest_ns: float) -> Iterator[Drawn]:
    """The cells of one panel, in which the longest timeline fills the width."""
    origin_ns = first_start_ns(timeline)
    shades = Shades(timeline)
    for device, row in enumerate(timeline.rows):
        starts = pair_starts(row)
        for position, span in enumerate(row):
            length_ns = span.end_ns - span.start_ns or THIN_WIDTH * longest_ns / PANEL_WIDTH
            width = length_ns * PANEL_WIDTH / longest_ns
            shade = shades.shade_of(device, span.action)
            yield Drawn(
                device,
                UPPER if position in starts else LOWER if position - 1 in starts else WHOLE,
                span.start_ns - origin_ns,
                length_ns,
                colours_of(span.action.kind, shade, shades.num_shades),
                next((border for least, border in BORDERS if width >= least), 0.0),
                cell_text(span, width),
            )


def cell_text(span: Span, width: float) -> str:
    """The longest text that fits: kind, microbatch and slice; without the kind; or nothing."""
    number = number_of(span.action)
    texts = (span.action.kind.name + number, number)
    return next((text for text in texts if (len(text) + 0.5) * LETTER_WIDTH < width), "")


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
