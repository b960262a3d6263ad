"""The parts of a picture, whichever form of file it gets."""

from collections.abc import Sequence
from typing import Literal, NamedTuple


class Bars(NamedTuple):
    """Rectangles of a colour, with white lines around them.

    Attributes:
        rectangles: left edge, upper edge, width and height of each.
        fill: the colour, as "#rrggbb".
        border: the width of the lines.
    """

    rectangles: Sequence[tuple[float, float, float, float]]
    fill: str
    border: float = 0.0


class Words(NamedTuple):
    """Texts of a form.

    Attributes:
        texts: of each a place on its base line, and the text.
        side: the side of the text that is at this place.
        size: the height of letters.
        ink: the colour, as "#rrggbb".
        weight: of the letters.
    """

    texts: Sequence[tuple[float, float, str]]
    side: Literal["left", "center", "right"] = "left"
    size: float = 10.0
    ink: str = "#000000"
    weight: Literal["normal", "bold"] = "normal"


class Picture(NamedTuple):
    """Bars and words, the later ones above the earlier. Lengths are points, from the top left.

    Attributes:
        width: of the whole.
        height: of the whole.
        parts: what is on it.
    """

    width: float
    height: float
    parts: Sequence[Bars | Words]
