"""The predicted times of a rehearsed step, from those of its actions."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from pykern.plan import Kind
from pykern.plan.costs import by_stage
from pykern.rehearse.prediction import _costs
from pykern.schedules import zb_h1


def test_a_frozen_stage_takes_its_time_beside_split_backwards() -> None:
    """Where other stages have I and W, its B was predicted to take no time."""
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    times |= {(kind, stage): [2.0, 4.0] for kind in (Kind.I, Kind.W) for stage in (0, 2)}
    times[Kind.B, 1] = [5.0]
    watched: Any = SimpleNamespace(plan=zb_h1(3, 4).with_frozen([1]), times=times)
    costs = _costs(watched, [0.0] * 3)
    assert by_stage(costs, Kind.B, 3) == [6.0, 5.0, 6.0]
    assert by_stage(costs, Kind.W, 3) == [3.0, 0.0, 3.0]
