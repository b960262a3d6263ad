"""The timeline of a call and of the backward through its output."""

import pytest

from pykern import schedules
from pykern.plan import Kind, Timeline
from pykern.plan.halves import forwards_first
from tests.fake_cuda.fake import FakeCuda
from tests.outside.cases import MICROBATCHES, batch, model, pipeline
from tests.support.pipelines import planned


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


@pytest.mark.parametrize("name", ["one_f_one_b", "zb_v"])
def test_gpus_time_both_halves_within_tracing(gpus: FakeCuda, name: str) -> None:
    plan = getattr(schedules, name)(2, MICROBATCHES)
    with planned(model(), plan, None, "cuda") as pipe:
        pipe(batch()).sum().backward()
        with pytest.raises(RuntimeError, match="no step has been traced"):
            pipe.timeline()
        with pipe.tracing():
            y = pipe(batch())
            assert {span.action.kind for row in pipe.timeline().rows for span in row} == {Kind.F}
            y.sum().backward()
        both = pipe.timeline()
        assert actions(both) == [list(row) for row in forwards_first(plan).rows]
        end_of_forwards = max(s.end_ns for row in both.rows for s in row if s.action.kind is Kind.F)
        first_behind = min(s.start_ns for row in both.rows for s in row if s.action.kind != Kind.F)
        assert first_behind >= end_of_forwards
        copies = {span.action for row in pipe.copies().rows for span in row}
        assert {action.kind for action in copies} == {Kind.COPY_F, Kind.COPY_B}
        assert actions(pipe.prediction()) == actions(both)


def test_a_backward_out_of_tracing_is_not_mixed_with_another_call(gpus: FakeCuda) -> None:
    with planned(model(), schedules.one_f_one_b(2, MICROBATCHES), None, "cuda") as pipe:
        with pipe.tracing():
            pipe(batch()).sum().backward()
            y = pipe(batch())
        y.sum().backward()
        assert {span.action.kind for row in pipe.timeline().rows for span in row} == {Kind.F}
        y = pipe(batch())
        with pipe.tracing():
            y.sum().backward()
        assert {span.action.kind for row in pipe.timeline().rows for span in row} == {Kind.F}
