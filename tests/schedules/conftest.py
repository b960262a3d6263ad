"""Every schedule of the catalogue with each of its options."""

from collections.abc import Callable
from functools import partial

import pytest

from pykern import schedules
from pykern.plan import Plan

VARIANTS: dict[str, Callable[[int, int], Plan]] = {
    "gpipe": schedules.gpipe,
    "one_f_one_b": schedules.one_f_one_b,
    **{f"interleaved-{v}": partial(schedules.interleaved, num_chunks=v) for v in (1, 2, 3, 4)},
    **{f"hanayo-{w}": partial(schedules.hanayo, waves=w) for w in (1, 2, 3, 4)},
    "one_f_one_b_eager": schedules.one_f_one_b_eager,
    "interleaved-groups": partial(schedules.interleaved, group=9),
    **{f"breadth_first-{v}": partial(schedules.breadth_first, num_chunks=v) for v in (1, 2, 3)},
    **{
        f"hanayo-optimised-{w}": partial(schedules.hanayo, waves=w, optimised=True)
        for w in (1, 2, 3, 4)
    },
    "pipedream": schedules.pipedream,
    "pipedream_2bw": schedules.pipedream_2bw,
    "zb_h1": schedules.zb_h1,
    "zb_h2": schedules.zb_h2,
    **{f"interleaved_zb-{v}": partial(schedules.interleaved_zb, num_chunks=v) for v in (1, 2, 3)},
    "zb_v": schedules.zb_v,
    "v_half": schedules.v_half,
    "v_min": schedules.v_min,
    **{f"gis-{v}": partial(schedules.gis, num_chunks=v) for v in (1, 2, 3)},
    "gis-half": lambda p, m: schedules.gis(p, m, num_chunks=3, group=(p + 1) // 2),
}


@pytest.fixture(params=VARIANTS)
def schedule(request: pytest.FixtureRequest) -> Callable[[int, int], Plan]:
    return VARIANTS[request.param]
