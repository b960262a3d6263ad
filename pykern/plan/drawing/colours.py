"""One colour for each kind and chunk: blue forwards, orange backwards, darker with every chunk."""

from typing import NamedTuple

from pykern._C import Kind

Rgb = tuple[int, int, int]

# From the first chunk to the last. The two differ in hue for every kind of colour vision.
RANGES: dict[Kind, tuple[Rgb, Rgb]] = {
    Kind.F: ((168, 206, 236), (33, 94, 156)),
    Kind.B: ((250, 207, 152), (196, 84, 20)),
}
OTHER: tuple[Rgb, Rgb] = ((210, 210, 210), (110, 110, 110))


class Colours(NamedTuple):
    """A cell's background and the text on it, as "#rrggbb"."""

    fill: str
    ink: str


def colours_of(kind: Kind, chunk: int, num_chunks: int) -> Colours:
    """The colours of an action on the `chunk`-th of its device's stages."""
    first, last = RANGES.get(kind, OTHER)
    share = chunk / (num_chunks - 1) if num_chunks > 1 else 0.25
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(first, last, strict=True))
    dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    return Colours(f"#{red:02x}{green:02x}{blue:02x}", "#ffffff" if dark else "#1a1a1a")
