"""The timeline of a call and of the backward through its output."""

import pytest

from pykern import schedules
from pykern.plan import Kind, Timeline
from pykern.plan.halves import forwards_first
from tests.outside.cases import MICROBATCHES, batch, model, pipeline


def actions(timeline: Timeline) -> list[list[object]]:
    return [[span.action for span in row] for row in timeline.rows]


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v"])
def test_the_backward_stands_behind_the_forward(name: str) -> None:
    plan = getattr(schedules, name)(2, MICROBATCHES)
    with pipeline(model(), plan) as pipe:
        y = pipe(batch())
        forward = pipe.timeline()
        assert {span.action.kind for row in forward.rows for span in row} == {Kind.F}
        y.sum().backward()
        both = pipe.timeline()
        assert actions(both) == [list(row) for row in forwards_first(plan).rows]
        for row in both.rows:
            times = [time for span in row for time in (span.start_ns, span.end_ns)]
            assert times == sorted(times)
        # Costs of the backward are known, and are those of the order that ran.
        assert actions(pipe.prediction()) == actions(both)
        pipe(batch())
        assert len(pipe.timeline().rows[0]) == len(forward.rows[0])
        # The backward of an earlier call leaves the last one as it is.
        first, _ = pipe(batch()), pipe(batch())
        first.sum().backward()
        assert len(pipe.timeline().rows[0]) == len(forward.rows[0])
