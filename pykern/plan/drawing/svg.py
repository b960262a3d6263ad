"""Pictures as SVG, by hand: small, the same bytes on every machine, without a library."""

from collections.abc import Mapping
from html import escape

from pykern._C import Timeline
from pykern.plan.drawing.layout import picture_of
from pykern.plan.drawing.shapes import Bars, Picture, Words

# SVG's names of the sides.
ANCHORS = {"left": "start", "center": "middle", "right": "end"}


def as_svg(timelines: Mapping[str, Timeline]) -> str:
    """The picture of timelines by label, which may be any string, as a complete SVG document."""
    return svg_of(picture_of(timelines))


def svg_of(picture: Picture) -> str:
    """A complete SVG document."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" '
        f'viewBox="0 0 {number(picture.width)} {number(picture.height)}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        *map(element, picture.parts),
        "</svg>\n",
    ]
    return "\n".join(lines)


def element(part: Bars | Words) -> str:
    """One path for all bars, one group for all words."""
    if isinstance(part, Bars):
        line = number(part.border).removeprefix("0")
        around = f' stroke="#fff" stroke-width="{line}"' if part.border else ""
        shape = "".join(bar(*rectangle) for rectangle in part.rectangles)
        return f'<path fill="{part.fill}"{around} d="{shape}"/>'
    form = f'font-size="{number(part.size)}" text-anchor="{ANCHORS[part.side]}" fill="{part.ink}"'
    bold = ' font-weight="bold"' if part.weight == "bold" else ""
    return f"<g {form}{bold}>{''.join(text(*placed) for placed in part.texts)}</g>"


def bar(x: float, y: float, width: float, height: float) -> str:
    """A rectangle as part of a path."""
    wide = number(width)
    return f"M{number(x)} {number(y)}h{wide}v{number(height)}h-{wide}z"


def text(x: float, y: float, content: str, more: str = "") -> str:
    """A text at its place, with these attributes besides."""
    # XML cannot hold a lone surrogate, but a label may contain one.
    shown = escape(content.encode("utf-8", "replace").decode("utf-8"), quote=False)
    return f'<text x="{number(x)}" y="{number(y)}"{more}>{shown}</text>'


def number(value: float) -> str:
    """A coordinate, to a hundredth of a point."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
