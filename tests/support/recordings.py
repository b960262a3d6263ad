"""Recordings of steps, by whichever tool: what is recorded, and what is read back."""

from itertools import chain
from statistics import median

from pykern.plan import Costs, Plan, Timeline, simulate, with_reductions
from pykern.profiling import Report
from pykern.recorded.profile import plan_of
from pykern.schedules import chimera, interleaved, one_f_one_b, zb_h1

MS = 1_000_000
COSTS = Costs(2.0 * MS, 4.0 * MS, input_ns=2.0 * MS, weight_ns=2.0 * MS)
PLANS = {
    "1F1B": one_f_one_b(3, 6),
    "interleaved": interleaved(2, 4, num_chunks=2),
    "zero bubble": zb_h1(4, 8),
    "replicas": with_reductions(chimera(4, 8)),
    "forward only": one_f_one_b(2, 3).forward_only(),
}
_SLOW, _USUAL = Costs(3.0 * MS, 6.0 * MS), Costs([1.0 * MS, 2.0 * MS], 4.0 * MS)
# A slow step, two usual ones, and one of another plan.
STEPS = [
    *(simulate(one_f_one_b(2, 4), costs) for costs in (_SLOW, _USUAL, _USUAL)),
    simulate(one_f_one_b(2, 2), _USUAL),
]
# The actions of each device by name, each with its time.
Times = list[list[tuple[str, float]]]


def assert_read_back(found: Timeline, plan: Plan, timeline: Timeline) -> None:
    """A step of the plan, as long as the timeline."""
    assert plan_of(found) == plan
    assert found.makespan_ns == timeline.makespan_ns
    assert found.bubble_ratio == timeline.bubble_ratio


def assert_usual(report: Report) -> None:
    """The profile of `STEPS`: that of the three with the most frequent actions."""
    assert report.seen.num_steps == 3
    assert report.seen.plan == one_f_one_b(2, 4)
    assert report.seen.timeline.makespan_ns == STEPS[1].makespan_ns
    assert report.seen.costs.forward_ns == [1.0 * MS, 2.0 * MS]
    assert report.predicted.makespan_ns == STEPS[1].makespan_ns
    assert report.first_cause in {"warm-up and cool-down", "imbalance of stages"}
    assert report.more[-1].rows == [("1",)]
    assert "3 steps in 4 microbatches, 2 stages on 2 devices" in str(report)


def assert_as_kernels(report: Report) -> None:
    """F, copy and B of one microbatch, of two stages on GPUs."""
    spans = [
        [(str(span.action), span.start_ns / MS, span.end_ns / MS) for span in row]
        for row in report.seen.timeline.rows
    ]
    assert spans == [[("0F0", 0, 2), ("0B0", 9, 10)], [("1F0", 3, 5), ("1B0", 5, 8)]]
    [table] = report.more
    assert table.rows == [
        ("F", "2", "0.00", "2.00"),
        ("B", "2", "0.00", "2.00"),
        ("COPY_F", "1", "0.00", "1.00"),
        ("COPY_B", "1", "0.00", "2.00"),
        # A third of the copies' time is that of the last backward's kernel.
        ("copies beside work", "33%", "", ""),
    ]


def times_of(timeline: Timeline) -> Times:
    """The times of its actions."""
    return [
        [(str(span.action), span.end_ns - span.start_ns) for span in row] for row in timeline.rows
    ]


def assert_last_as_long(found: Times, expected: Times) -> None:
    """Each action is there once, and lasts as long by both clocks."""
    assert [[name for name, _ in row] for row in found] == [
        [name for name, _ in row] for row in expected
    ]
    pairs = zip(chain(*found), chain(*expected), strict=True)
    differences = [abs(ours - theirs) for (_, ours), (_, theirs) in pairs]
    # A thread may lose its core between the two clocks, so single actions prove nothing.
    assert median(differences) < 50_000
