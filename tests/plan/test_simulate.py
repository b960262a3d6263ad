"""The simulator against an independent recursion and small cases by hand; what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.plan import Action, Costs, Placement, Plan, PlanError, Timeline, by_slots, simulate
from tests.plan.oracle import Oracle, full_plans, times_for
from tests.support.plans import plan_of


@given(st.data())
def test_every_span_is_where_the_recursion_says(data: st.DataObject) -> None:
    plan = data.draw(full_plans())
    times = data.draw(times_for(plan))
    timeline = simulate(plan, times.costs())
    oracle = Oracle(plan, times)
    assert tuple(tuple(s.action for s in row) for row in timeline.rows) == plan.rows
    for row in timeline.rows:
        for span in row:
            assert span.start_ns == oracle.start(span.action)
            assert span.end_ns == oracle.end(span.action)


def times_of(timeline: Timeline) -> list[list[tuple[float, float]]]:
    return [[(span.start_ns, span.end_ns) for span in row] for row in timeline.rows]


TWO_STAGES = plan_of(Placement.linear(2), 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def test_a_message_takes_latency_and_its_size_over_the_bandwidth() -> None:
    costs = Costs(1, 2, 0.5, message_bytes=[6, 0], bandwidth=4)
    # The boundary behind stage 0 carries both ways: 0.5 + 6 / 4 = 2 each time.
    assert times_of(simulate(TWO_STAGES, costs)) == [
        [(0, 1), (1, 2), (8, 10), (11, 13)],
        [(3, 4), (4, 6), (6, 7), (7, 9)],
    ]


def test_messages_wait_for_each_other_where_links_are_shared() -> None:
    forwards = TWO_STAGES.forward_only()
    alone = Costs(1, 2, 0.5, message_bytes=3, bandwidth=1)
    shared = Costs(1, 2, 0.5, message_bytes=3, bandwidth=1, shared_links=True)
    assert times_of(simulate(forwards, alone))[1] == [(4.5, 5.5), (5.5, 6.5)]
    # The second message leaves at 4, when the first has gone, and not at 2.
    assert times_of(simulate(forwards, shared))[1] == [(4.5, 5.5), (7.5, 8.5)]


def test_links_of_other_pairs_are_not_shared() -> None:
    rows = ["0F0 2F0 0F1 2F1", "1F0 1F1", "3F0 3F1"]
    plan = plan_of(Placement(3, [0, 1, 0, 2]), 2, *rows)
    costs = Costs(1, 2, message_bytes=8, bandwidth=1, shared_links=True)
    there_and_back = [(0, 1), (18, 19), (19, 20), (37, 38)]
    assert times_of(simulate(plan, costs))[0] == there_and_back
    assert times_of(simulate(plan, costs))[2] == [(27, 28), (46, 47)]


def test_a_pair_takes_the_longer_and_what_does_not_overlap_of_the_shorter() -> None:
    rows = [["0F0", "1F0", "0F1", "1B0", "0B0", "1F1", "1B1", "0B1"]]
    actions = [[Action.parse(text) for text in row] for row in rows]
    plan = Plan(Placement(1, [0, 0]), 2, actions, 1, [[2]])
    for overlap, pair_ns in ((0, 4), (0.5, 3.5), (1, 3)):
        timeline = simulate(plan, Costs(1, 3, overlap=overlap))
        assert times_of(timeline)[0][2:5] == [
            (2, 2 + pair_ns),
            (2, 2 + pair_ns),
            (2 + pair_ns, 5 + pair_ns),
        ]
        assert timeline.busy_ns(0) == timeline.makespan_ns == 12 + pair_ns
        assert timeline.bubble_ratio == 0


def test_speeds_and_overhead() -> None:
    plan = TWO_STAGES.forward_only()
    costs = Costs(4, 1, overhead_ns=1, device_speeds=[2, 1])
    assert times_of(simulate(plan, costs)) == [[(0, 3), (3, 6)], [(3, 8), (8, 13)]]
    assert simulate(plan, Costs(4, 1, device_speeds=2)) == simulate(plan, Costs(2, 1))


def test_updates_wait_for_reductions_with_the_latency_alone() -> None:
    placement = Placement.replicated(2, [[0], [1]])
    plan = plan_of(placement, 2, "0F0 0B0 0REDUCE0 0U0", "0F1 0B1 0U1")
    costs = Costs(1, 2, 0.5, reduce_ns=4, update_ns=8, message_bytes=100, bandwidth=1)
    assert times_of(simulate(plan, costs)) == [
        [(0, 1), (1, 3), (3.5, 7.5), (7.5, 15.5)],
        [(0, 1), (1, 3), (8, 16)],
    ]


def test_one_time_for_every_stage_is_a_list_of_the_same() -> None:
    plan = by_slots(Placement.wave(3, 1), 5, group=3, group_offset=12)
    short, long = Costs(2, 3, 0.5), Costs([2] * 6, [3] * 6, 0.5)
    assert simulate(plan, short).rows == simulate(plan, long).rows


@pytest.mark.parametrize("shared_links", [False, True])
def test_costs_of_another_plan_are_refused(shared_links: bool) -> None:
    for costs, message in [
        (Costs([1, 1, 1], 1), "forward_ns must hold one value for each of 2 stages, got 3"),
        (Costs(1, []), "backward_ns must hold one value for each of 2 stages, got 0"),
        (
            Costs(1, 1, message_bytes=[1], shared_links=shared_links),
            "message_bytes must hold one value for each of 2 stages, got 1",
        ),
        (
            Costs(1, 1, device_speeds=[1, 1, 1]),
            "device_speeds must hold one value for each of 2 devices, got 3",
        ),
        (Costs(1e308, 1e308), "finite number of nanoseconds, got more than a double holds"),
    ]:
        with pytest.raises(ValueError, match=message):
            simulate(TWO_STAGES, costs)


def test_a_plan_that_cannot_run_is_refused() -> None:
    with pytest.raises(PlanError, match="P006"):
        simulate(Plan(Placement.linear(2), 2, [r[::-1] for r in TWO_STAGES.rows]), Costs(1, 1))
    with pytest.raises(PlanError, match="P005"):
        simulate(Plan(Placement.linear(2), 2, [TWO_STAGES.rows[0], ()]), Costs(1, 1))
    stuck = plan_of(Placement(2, [0, 1, 0]), 1, "2F0 0F0", "1F0")
    with pytest.raises(PlanError, match="P007"):
        simulate(stuck, Costs(1, 1))
