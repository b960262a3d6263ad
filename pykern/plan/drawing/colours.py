"""A hue for each kind; darker with every chunk and replica."""

from typing import NamedTuple

from pykern._C import Kind

Rgb = tuple[int, int, int]

# From the first shade to the last. F and B differ in hue for every kind of colour vision, and so do
# F, I and W, which stand beside each other where a backward is split.
RANGES: dict[Kind, tuple[Rgb, Rgb]] = {
    Kind.F: ((168, 206, 236), (33, 94, 156)),
    Kind.B: ((250, 207, 152), (196, 84, 20)),
    Kind.I: ((246, 178, 196), (176, 40, 92)),
    Kind.W: ((222, 228, 140), (120, 128, 20)),
    Kind.R: ((212, 198, 238), (106, 76, 160)),
    Kind.U: ((190, 226, 216), (40, 120, 104)),
}
OTHER: tuple[Rgb, Rgb] = ((210, 210, 210), (110, 110, 110))


class Colours(NamedTuple):
    """A cell's background and the text on it, as "#rrggbb"."""

    fill: str
    ink: str


def colours_of(kind: Kind, shade: int, num_shades: int) -> Colours:
    """The colours of an action in the `shade`-th of so many shades."""
    first, last = RANGES.get(kind, OTHER)
    share = shade / (num_shades - 1) if num_shades > 1 else 0.25
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, last, strict=True))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    return Colours(f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if dark else "#1a1a1a")
