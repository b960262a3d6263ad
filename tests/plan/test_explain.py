"""Why a plan takes its time: the idle time by cause, and the critical path."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.plan import (
    Action,
    Bubble,
    Costs,
    Placement,
    Plan,
    Span,
    Timeline,
    Wait,
    bubbles,
    critical_path,
    simulate,
)
from tests.plan.oracle import Oracle, full_plans, times_for

FORWARD_AND_BACK = Plan(
    Placement.linear(2),
    2,
    [
        [Action.parse(text) for text in ("0F0", "0F1", "0B0", "0B1")],
        [Action.parse(text) for text in ("1F0", "1B0", "1F1", "1B1")],
    ],
)


def test_bubbles_of_a_small_plan_by_hand() -> None:
    # Device 0: 0-1, 1-2, 5-7, 8-10; device 1: 1.5-2.5, 2.5-4.5, 4.5-5.5, 5.5-7.5.
    assert bubbles(FORWARD_AND_BACK, Costs(1, 2, 0.5)) == [
        Bubble(before_first_ns=0, after_last_ns=0, compute_ns=3.0, transfer_ns=1.0),
        Bubble(before_first_ns=1.5, after_last_ns=2.5, compute_ns=0, transfer_ns=0),
    ]


def test_a_device_without_work_idles_before_its_first_action() -> None:
    plan = Plan(Placement(2, [0]), 1, [[Action.parse("0F0")], []])
    assert bubbles(plan, Costs(3, 1)) == [Bubble(0, 0, 0, 0), Bubble(3, 0, 0, 0)]


def test_critical_path_of_a_small_plan_by_hand() -> None:
    path = critical_path(FORWARD_AND_BACK, Costs(1, 2, 0.5))
    assert [(str(step.span.action), step.device, step.wait) for step in path] == [
        ("0F0", 0, Wait.NOTHING),
        ("1F0", 1, Wait.TRANSFER),
        ("1B0", 1, Wait.ROW),
        ("1F1", 1, Wait.ROW),
        ("1B1", 1, Wait.ROW),
        ("0B1", 0, Wait.TRANSFER),
    ]
    without_transfers = critical_path(FORWARD_AND_BACK, Costs(1, 2))
    assert [step.wait for step in without_transfers][1::4] == [Wait.INPUT, Wait.INPUT]


@given(st.data())
def test_the_causes_add_up_to_the_idle_time(data: st.DataObject) -> None:
    plan = data.draw(full_plans())
    times = data.draw(times_for(plan))
    timeline = simulate(plan, times.costs())
    causes = bubbles(plan, times.costs())
    oracle = Oracle(plan, times)
    for device, bubble in enumerate(causes):
        parts = (
            bubble.before_first_ns,
            bubble.after_last_ns,
            bubble.compute_ns,
            bubble.transfer_ns,
        )
        assert min(parts) >= 0
        assert sum(parts) == timeline.makespan_ns - timeline.busy_ns(device)
        assert bubble.compute_ns == waited_for_compute(oracle, device)
    idle_ns = timeline.makespan_ns * plan.num_devices * timeline.bubble_ratio
    total = sum(b.before_first_ns + b.after_last_ns + b.compute_ns + b.transfer_ns for b in causes)
    assert math.isclose(total, idle_ns, abs_tol=1e-9)


def waited_for_compute(oracle: Oracle, device: int) -> float:
    """Idle time between actions until what arrived last had been computed."""
    total = 0.0
    for action in oracle.plan.rows[device]:
        before, start = oracle.before(action), oracle.start(action)
        if before is None or action != oracle.slot(action)[0] or oracle.end(before) == start:
            continue
        arrivals = [
            (oracle.arrival(reader, needed), oracle.end(needed))
            for reader in oracle.slot(action)
            for needed in oracle.needs(reader)
            if oracle.device(needed) != device
        ]
        computed = max(arrivals)[1]
        total += max(0.0, computed - oracle.end(before))
    return total


@given(st.data())
def test_each_step_of_a_critical_path_starts_when_the_one_before_lets_it(
    data: st.DataObject,
) -> None:
    plan = data.draw(full_plans())
    times = data.draw(times_for(plan))
    path = critical_path(plan, times.costs())
    timeline = simulate(plan, times.costs())
    oracle = Oracle(plan, times)
    assert (path[0].span.start_ns, path[0].wait) == (0, Wait.NOTHING)
    assert path[-1].span.end_ns == timeline.makespan_ns
    for step in path:
        assert step.span in timeline.rows[step.device]
    for before, step in pairwise(path):
        earlier, action = before.span.action, step.span.action
        if step.wait is Wait.ROW:
            assert earlier == oracle.before(action)
            assert step.span.start_ns == before.span.end_ns
            continue
        reader = next(a for a in oracle.slot(action) if earlier in oracle.needs(a))
        assert step.span.start_ns == oracle.arrival(reader, earlier)
        assert step.device != before.device
        assert (step.wait is Wait.INPUT) == (step.span.start_ns == before.span.end_ns)


def measured(*rows: str) -> Timeline:
    """A step from texts such as "0F0 2-3 0B0 5-7"."""

    def spans(words: list[str]) -> list[Span]:
        pairs = zip(words[::2], (word.split("-") for word in words[1::2]), strict=True)
        return [Span(Action.parse(text), float(a), float(b)) for text, (a, b) in pairs]

    return Timeline([spans(row.split()) for row in rows])


LATE = measured("0F0 2-3 0F1 4-5 0B0 9-11 0B1 12-14", "1F0 5-6 1B0 6-8 1F1 8-9 1B1 9-11")


def test_bubbles_of_a_measured_step_by_hand() -> None:
    # Device 0: 1 before 0F1, whose inputs are there; 3 for 1B0 and 1 behind it; 1 for 1B1 and then
    # nothing: 1B1 ends as device 0 is free. Device 1 begins 3 after the step, and ends 3 before it.
    assert bubbles(FORWARD_AND_BACK, LATE) == [
        Bubble(0, 0, compute_ns=3, transfer_ns=1, issue_ns=2),
        Bubble(before_first_ns=3, after_last_ns=3, compute_ns=0, transfer_ns=0),
    ]


def test_critical_path_of_a_measured_step_by_hand() -> None:
    path = critical_path(FORWARD_AND_BACK, LATE)
    assert [(str(step.span.action), step.wait) for step in path] == [
        ("0F0", Wait.NOTHING),
        ("1F0", Wait.TRANSFER),
        ("1B0", Wait.ROW),
        ("0B0", Wait.TRANSFER),
        ("0B1", Wait.ROW),
    ]


def test_a_step_of_another_plan_is_refused() -> None:
    first, second = LATE.rows
    for rows in ([first], [first, second[:-1]], [second, first], [first, second, []]):
        with pytest.raises(ValueError, match="measured must have the actions of the plan, got"):
            bubbles(FORWARD_AND_BACK, Timeline(rows))


@given(st.data())
def test_a_simulated_step_is_explained_as_a_measured_one(data: st.DataObject) -> None:
    drawn = data.draw(full_plans())
    # Nothing that runs is a pair of actions side by side.
    plan = Plan(drawn.placement, drawn.num_microbatches, drawn.rows, drawn.num_slices)
    timeline = simulate(plan, data.draw(times_for(plan)).costs())
    for device, bubble in enumerate(bubbles(plan, timeline)):
        parts = (bubble.before_first_ns, bubble.after_last_ns, bubble.compute_ns)
        total = sum(parts) + bubble.transfer_ns + bubble.issue_ns
        assert total == timeline.makespan_ns - timeline.busy_ns(device)
    path = critical_path(plan, timeline)
    assert path[-1].span.end_ns == timeline.makespan_ns
    for before, step in pairwise(path):
        assert before.span.end_ns <= step.span.start_ns
