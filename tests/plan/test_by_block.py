"""Plans that repeat one microbatch's timetable: W in the free slots, and the squeeze."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.plan import Memory, Placement, Plan, PlanError, by_block, peak_bytes


def test_weights_take_the_free_slots_oldest_first() -> None:
    plan = by_block(Placement(1, [0, 0]), 1, [0, 1], [3, 2], interval=6)
    assert str(plan) == "device 0 | 0F0 1F0 1I0 0I0 1W0 0W0"


def test_actions_move_to_the_first_free_slot_that_keeps_the_peak() -> None:
    # F0 . I0 W0 F1 . I1 W1 repeats: at a peak of one, I moves up and the next F cannot.
    one = by_block(Placement.linear(1), 2, [0], [2], interval=4)
    assert str(one) == "device 0 | 0F0 0I0 0W0 0F1 0I1 0W1"
    # F0 . . F1 I0 W0 F2 I1 W1 . I2 W2: at a peak of two, F1 moves up to slot 1, and F2 to slot 4,
    # behind W0; I1 and I2 follow, each to the first free slot, and W1 has to wait for them.
    two = by_block(Placement.linear(1), 3, [0], [4], interval=3)
    assert str(two) == "device 0 | 0F0 0F1 0I0 0W0 0F2 0I1 0I2 0W1 0W2"


def test_a_steady_block_leaves_weights_in_their_slots_up_to_the_last_forward() -> None:
    block = (Placement(1, [0, 0]), 3, [0, 1], [5, 4], 6)
    early, steady = by_block(*block), by_block(*block, steady=True)
    assert str(early) == (
        "device 0 | 0F0 1F0 1I0 0I0 0F1 1F1 1I1 0I1 1W0 0F2 0W0 1F2 1I2 0I2 1W1 0W1 1W2 0W2"
    )
    assert str(steady) == (
        "device 0 | 0F0 1F0 1I0 1W0 0I0 0W0 0F1 1F1 1I1 1W1 0I1 0W1 0F2 1F2 1I2 0I2 1W2 0W2"
    )


blocks = st.integers(1, 4).flatmap(
    lambda num_devices: st.tuples(
        st.just(num_devices), st.lists(st.integers(1, 3), min_size=4 * num_devices)
    )
)


@given(blocks, st.integers(1, 6))
def test_no_block_exceeds_its_own_peak_and_microbatches_ascend(
    block: tuple[int, list[int]], num_microbatches: int
) -> None:
    num_devices, steps = block
    slots = [sum(steps[: i + 1]) for i in range(4 * num_devices)]
    forward, backward = slots[: 2 * num_devices], slots[2 * num_devices :][::-1]
    interval = 3 * slots[-1]  # one microbatch at a time, so that none meets another
    placement = Placement.wave(num_devices, waves=1)
    plan = by_block(placement, num_microbatches, forward, backward, interval)
    alone = by_block(placement, 1, forward, backward, interval)
    assert max(peak_bytes(plan, Memory(1, 1))) <= max(peak_bytes(alone, Memory(1, 1)))
    for row in plan.rows:
        for stage, kind in {(action.stage, action.kind) for action in row}:
            order = [a.microbatch for a in row if (a.stage, a.kind) == (stage, kind)]
            assert order == list(range(num_microbatches))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: by_block(p, 0, [0, 1], [3, 2], 6), "num_microbatches must be 1 to"),
        (lambda p: by_block(p, 1, [0], [3, 2], 6), "number of forward_slots must be 2 to 2, got 1"),
        (lambda p: by_block(p, 1, [0, 1], [3], 6), "number of input_slots must be 2 to 2, got 1"),
        (lambda p: by_block(p, 1, [0, -1], [3, 2], 6), "slot must be 0 to 16777216, got -1"),
        (lambda p: by_block(p, 1, [0, 1], [3, 2], 0), "interval must be 1 to 65536, got 0"),
        (lambda p: by_block(p, 2**22, [0, 1], [3, 2], 999), "slots of all devices must be 1 to"),
        (lambda p: by_block(p, 1, [0, 1], [3, 1], 6), "got two in slot 1 of device 0"),
        (lambda p: by_block(p, 2, [0, 1], [3, 2], 3), "got two in slot 3 of device 0"),
    ],
)
def test_bad_numbers_are_refused(make: Callable[[Placement], Plan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(Placement(1, [0, 0]))


def test_a_block_against_its_inputs_is_refused_by_the_check() -> None:
    with pytest.raises(PlanError, match="P006"):
        by_block(Placement(1, [0, 0]), 1, [1, 0], [2, 3], interval=6)
