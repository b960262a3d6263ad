"""List scheduling: forwards as early as inputs and the cap let them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern import schedules
from pykern.plan import Action, Costs, Kind, Placement, Plan, by_list, by_slots, check, simulate

UNIT = Costs(1, 2)  # one slot for each of F, I and W


def peaks(plan: Plan) -> list[int]:
    timeline = simulate(plan, Costs(1, 1))
    return [timeline.peak_in_flight(device) for device in range(plan.num_devices)]


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_microbatches", [1, 4, 9])
def test_without_a_cap_1f1b_becomes_gpipe(num_devices: int, num_microbatches: int) -> None:
    plan = by_list(schedules.one_f_one_b(num_devices, num_microbatches), cap=num_microbatches)
    assert plan == schedules.gpipe(num_devices, num_microbatches)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 12), st.integers(0, 8))
def test_the_cap_holds_and_queues_keep_their_order(
    num_devices: int, waves: int, num_microbatches: int, slack: int
) -> None:
    placement = Placement.wave(num_devices, waves)
    stages = placement.num_stages
    order = by_slots(placement, num_microbatches, num_devices, group_offset=2 * stages)
    plan = by_list(order, cap=stages + slack)
    assert max(peaks(plan)) <= stages + slack
    for row, scheduled in zip(order.rows, plan.rows, strict=True):
        for kind in (Kind.F, Kind.B):
            queue = [action for action in row if action.kind is kind]
            assert [action for action in scheduled if action.kind is kind] == queue


def test_weight_gradients_fill_the_slots_that_nothing_else_can_have() -> None:
    plan = by_list(schedules.zb_h2(4, 9), cap=5)
    assert max(peaks(plan)) == 5
    spans = [span for row in simulate(plan, UNIT).rows for span in row]
    start = {span.action: span.start_ns for span in spans}
    for weight in [span for span in spans if span.action.kind is Kind.W]:
        stage, now = weight.action.stage, weight.start_ns
        later = [a for a in plan.rows[stage] if start[a] > now]
        for action in [a for a in later if a.kind is Kind.I][:1]:
            assert ready(start, action, Action(Kind.I, stage + 1, action.microbatch)) > now
        for action in [a for a in later if a.kind is Kind.F][:1]:
            if held(plan, weight.action) < 5:
                assert ready(start, action, Action(Kind.F, stage - 1, action.microbatch)) > now
    assert str(by_list(schedules.zb_h1(1, 2), cap=2)) == "device 0 | 0F0 0F1 0I0 0I1 0W0 0W1"


def ready(start: dict[Action, float], action: Action, neighbour: Action) -> float:
    """When the action's inputs have ended: its neighbour's, or on the last stage its own F."""
    own = Action(Kind.F, action.stage, action.microbatch)
    return start.get(neighbour, start[own]) + 1


def held(plan: Plan, weight: Action) -> int:
    """The microbatches that the device of `weight` has in flight when it starts it."""
    row = plan.rows[weight.stage]
    before = [action.kind for action in row[: row.index(weight)]]
    return before.count(Kind.F) - before.count(Kind.W)


def test_replicas_and_slices_are_scheduled_too() -> None:
    check(by_list(schedules.chimera(4, 8), cap=8))
    check(by_list(schedules.seq1f1b(4, 8), cap=8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: by_list(schedules.gpipe(2, 2), 0), "cap must be 1 to 16777216, got 0"),
        (
            lambda: by_list(schedules.interleaved(2, 4), 1),
            "cap must be large enough .* got 1, which stops all devices, device 0 before 0F1",
        ),
        (
            lambda: by_list(schedules.pipedream(2, 2), 2),
            "actions must be F, B, I or W for list scheduling, got 0U0",
        ),
        (lambda: by_list(Plan(Placement.linear(1), 1, [[]]), 1), "0F0 is missing"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Plan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
