"""The catalogue: a file per published schedule, a pure function of integers to a checked Plan."""

from collections.abc import Callable

from ..plan import Plan
from .gpipe import gpipe
from .hanayo import hanayo
from .interleaved import interleaved
from .one_f_one_b import one_f_one_b

__all__ = ["by_name", "gpipe", "hanayo", "interleaved", "one_f_one_b"]

# What the command line, Pipeline and the tests go by.
by_name: dict[str, Callable[..., Plan]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "hanayo": hanayo,
}
