"""The catalogue: a file per published schedule, a pure function of integers to a checked Plan."""

from collections.abc import Callable

from ..plan import Plan
from .gpipe import gpipe
from .hanayo import hanayo
from .interleaved import interleaved
from .interleaved_zb import interleaved_zb
from .one_f_one_b import one_f_one_b
from .v_half import v_half
from .v_min import v_min
from .zb_h1 import zb_h1
from .zb_h2 import zb_h2
from .zb_v import zb_v

__all__ = [
    "by_name",
    "gpipe",
    "hanayo",
    "interleaved",
    "interleaved_zb",
    "one_f_one_b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

# What the command line, Pipeline and the tests go by.
by_name: dict[str, Callable[..., Plan]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "hanayo": hanayo,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
}
