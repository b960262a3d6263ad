"""The simulator against an independent recursion, and what it refuses."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.plan import Action, Costs, Kind, Placement, Plan, PlanError, by_slots, simulate


def ends_by_recursion(
    plan: Plan, forward: list[int], backward: list[int], transfer: int
) -> dict[Action, int]:
    """Oracle: an action ends its time after the latest of what the chain and its device require."""
    before = {b: a for row in plan.rows for a, b in pairwise(row)}
    last_stage = plan.num_stages - 1

    @cache
    def end(action: Action) -> int:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        start = end(before[action]) if action in before else 0
        if kind is Kind.B and stage == last_stage:
            start = max(start, end(Action(Kind.F, stage, microbatch)))
        elif kind is Kind.B or stage > 0:
            source = stage + 1 if kind is Kind.B else stage - 1
            devices = plan.placement.replicas[0]
            latency = transfer if devices[source] != devices[stage] else 0
            start = max(start, end(Action(kind, source, microbatch)) + latency)
        return start + (forward if kind is Kind.F else backward)[stage]

    return {action: end(action) for row in plan.rows for action in row}


@given(st.data())
def test_every_span_ends_where_the_recursion_says(data: st.DataObject) -> None:
    num_devices = data.draw(st.integers(1, 4))
    devices = data.draw(st.lists(st.integers(0, num_devices - 1), min_size=1, max_size=8))
    num_microbatches = data.draw(st.integers(1, 6))
    placement = Placement(num_devices, devices)
    plan = by_slots(placement, num_microbatches, data.draw(st.integers(1, 6)), 64)
    times = st.lists(st.integers(0, 9), min_size=len(devices), max_size=len(devices))
    forward, backward = data.draw(times), data.draw(times)
    transfer = data.draw(st.integers(0, 5))
    timeline = simulate(plan, Costs(forward, backward, transfer))
    ends = ends_by_recursion(plan, forward, backward, transfer)
    assert {s.action: s.end_ns for row in timeline.rows for s in row} == ends
    assert tuple(tuple(s.action for s in row) for row in timeline.rows) == plan.rows
    for row in timeline.rows:
        for span in row:
            times_of_kind = forward if span.action.kind is Kind.F else backward
            assert span.end_ns - span.start_ns == times_of_kind[span.action.stage]


def test_one_time_for_every_stage_is_a_list_of_the_same() -> None:
    plan = by_slots(Placement.wave(3, 1), 5, group=3, group_offset=12)
    short, long = Costs(2, 3, 0.5), Costs([2] * 6, [3] * 6, 0.5)
    assert simulate(plan, short).rows == simulate(plan, long).rows


def one_f_one_b() -> Plan:
    return by_slots(Placement.linear(2), 2, group=1, group_offset=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Costs(-1, 1), "forward_ns must be finite and not negative, got -1"),
        (lambda: Costs(1, float("nan")), "backward_ns must be finite and not negative, got nan"),
        (lambda: Costs(1, [1, float("inf")]), "backward_ns of stage 1 must be finite"),
        (lambda: Costs(1, 1, -0.5), "transfer_ns must be finite and not negative, got -0.5"),
        (
            lambda: simulate(one_f_one_b(), Costs([1, 1, 1], 1)),
            "forward_ns must hold one value for",
        ),
        (lambda: simulate(one_f_one_b(), Costs(1, [])), "each of 2 stages, got 0"),
    ],
)
def test_bad_costs_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plan_that_cannot_run_is_refused() -> None:
    plan = one_f_one_b()
    with pytest.raises(PlanError, match="P006"):
        simulate(Plan(plan.placement, 2, [row[::-1] for row in plan.rows]), Costs(1, 1))
    with pytest.raises(PlanError, match="P005"):
        simulate(Plan(plan.placement, 2, [plan.rows[0], ()]), Costs(1, 1))
