"""The catalogue: a file per published schedule, a pure function of integers to a checked Plan."""

from collections.abc import Callable

from ..one_of import require_one_of
from ..plan import Plan
from .breadth_first import breadth_first
from .chimera import chimera
from .dualpipe_v import dualpipe_v
from .forward_only import forward_only
from .gis import gis
from .gpipe import gpipe
from .hanayo import hanayo
from .interleaved import interleaved
from .interleaved_zb import interleaved_zb
from .one_f_one_b import one_f_one_b
from .one_f_one_b_eager import one_f_one_b_eager
from .pipedream import pipedream
from .pipedream_2bw import pipedream_2bw
from .seq1f1b import seq1f1b
from .v_half import v_half
from .v_min import v_min
from .zb_h1 import zb_h1
from .zb_h2 import zb_h2
from .zb_v import zb_v

__all__ = [
    "NUM_COUNTS",
    "breadth_first",
    "by_name",
    "chimera",
    "dualpipe_v",
    "forward_only",
    "gis",
    "gpipe",
    "hanayo",
    "interleaved",
    "interleaved_zb",
    "one_f_one_b",
    "one_f_one_b_eager",
    "pipedream",
    "pipedream_2bw",
    "require_named",
    "seq1f1b",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

# The command line, Pipeline and the tests go by these tables.
by_name: dict[str, Callable[..., Plan]] = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "one_f_one_b_eager": one_f_one_b_eager,
    "interleaved": interleaved,
    "breadth_first": breadth_first,
    "chimera": chimera,
    "hanayo": hanayo,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "interleaved_zb": interleaved_zb,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "gis": gis,
    "dualpipe_v": dualpipe_v,
    "seq1f1b": seq1f1b,
    "pipedream": pipedream,
    "pipedream_2bw": pipedream_2bw,
    "forward_only": forward_only,
}

# The number of first parameters of every schedule: the devices and the microbatches.
NUM_COUNTS = 2
# The names that papers and other libraries use for these schedules.
_MEANT = {
    "1f1b": "one_f_one_b",
    "1f1beager": "one_f_one_b_eager",
    "2bw": "pipedream_2bw",
    "dualpipe": "dualpipe_v",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "interleaved_zb",
    "loopedbfs": "breadth_first",
    "zb": "zb_h1",
    "zbvzerobubble": "zb_v",
    "zerobubble": "zb_h1",
}


def require_named(schedule: str, *others: str) -> None:
    """Raises ValueError unless the catalogue, or `others`, has a schedule of this name."""
    require_one_of("schedule", schedule, sorted((*others, *by_name)), _MEANT)
