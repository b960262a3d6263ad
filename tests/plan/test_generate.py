"""The generators by themselves: what they promise and what they refuse."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.plan import Action, Kind, Placement, Plan, PlanError, by_phases, by_slots

placements = st.integers(1, 4).flatmap(
    lambda n: st.builds(
        Placement,
        st.just(n),
        st.lists(st.integers(0, n - 1), min_size=1, max_size=8),
    )
)


@given(placements, st.integers(1, 6), st.integers(1, 7), st.integers(0, 20))
def test_the_lattice_runs_on_any_placement_with_microbatches_ascending(
    placement: Placement, num_microbatches: int, group: int, slack: int
) -> None:
    plan = by_slots(placement, num_microbatches, group, 2 * group + slack)
    for row in plan.rows:
        for stage in {action.stage for action in row}:
            for kind in {action.kind for action in row}:
                order = [a.microbatch for a in row if (a.stage, a.kind) == (stage, kind)]
                assert order == list(range(num_microbatches))


replicated = st.tuples(st.integers(1, 4), st.integers(1, 6)).flatmap(
    lambda size: st.builds(
        Placement.replicated,
        st.just(size[0]),
        st.lists(
            st.lists(st.integers(0, size[0] - 1), min_size=size[1], max_size=size[1]),
            min_size=1,
            max_size=3,
        ),
    )
)


@given(replicated, st.integers(1, 9), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_the_lattice_runs_with_replicas_units_and_slices(
    placement: Placement, num_microbatches: int, group: int, unit: int, num_slices: int
) -> None:
    least = 2 * num_slices * group
    plan = by_slots(placement, num_microbatches, group, least, unit, num_slices)
    assert plan.num_actions == 2 * placement.num_stages * num_microbatches * num_slices
    for row in plan.rows:
        for cell in {cell_of(plan, action) for action in row}:
            order = [action.microbatch for action in row if cell_of(plan, action) == cell]
            assert order == sorted(order)


def cell_of(plan: Plan, action: Action) -> tuple[int, Kind, int, int]:
    replica = action.microbatch % plan.placement.num_replicas
    return action.stage, action.kind, action.slice, replica


def test_a_unit_takes_the_place_of_one_microbatch() -> None:
    plan = by_slots(Placement.linear(2), 4, group=1, group_offset=2, unit=2)
    assert str(plan).split("\n") == [
        "device 0 | 0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "device 1 | 1F0 1F1 1B0 1B1 1F2 1F3 1B2 1B3",
    ]


def test_phases_deal_groups_of_near_equal_size() -> None:
    plan = by_phases(Placement(1, [0, 0]), 7, warmup=[14], group=3)
    forwards = " ".join(str(action) for action in plan.rows[0][:14])
    assert forwards == "0F0 0F1 0F2 1F0 1F1 1F2 0F3 0F4 1F3 1F4 0F5 0F6 1F5 1F6"
    backwards = " ".join(str(action) for action in plan.rows[0][14:])
    assert backwards == "1B0 1B1 1B2 0B0 0B1 0B2 1B3 1B4 0B3 0B4 1B5 1B6 0B5 0B6"


def test_phases_run_warm_up_then_pairs_then_the_rest() -> None:
    plan = by_phases(Placement.linear(1), 4, warmup=[2], group=4)
    assert str(plan) == "device 0 | 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"


def test_weights_follow_the_given_number_of_backwards_later() -> None:
    plan = by_phases(Placement.linear(1), 4, warmup=[1], group=4, weight_delay=[2])
    assert str(plan) == "device 0 | 0F0 0F1 0I0 0F2 0I1 0F3 0I2 0W0 0I3 0W1 0W2 0W3"
    late = by_phases(Placement.linear(1), 2, warmup=[2], group=2, weight_delay=[9])
    assert str(late) == "device 0 | 0F0 0F1 0I0 0I1 0W0 0W1"


def test_a_warm_up_too_short_is_refused_by_the_check() -> None:
    with pytest.raises(PlanError, match="P006"):
        by_phases(Placement(1, [0, 0]), 2, warmup=[0], group=2)
    with pytest.raises(PlanError, match="P007"):
        by_phases(Placement.looped(2, 2), 4, warmup=[3, 4], group=2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: by_slots(p, 0, 1, 2), "num_microbatches must be 1 to 16777216, got 0"),
        (
            lambda p: by_slots(p, 2**24, 1, 2),
            r"num_stages \* num_microbatches \* num_slices must be",
        ),
        (lambda p: by_slots(p, 4, 0, 2), "group must be 1 to 16777216, got 0"),
        (lambda p: by_slots(p, 4, 3, 5), "group_offset must be 6 to 2147483647, got 5"),
        (lambda p: by_slots(p, 4, 1, 2, 0), "unit must be 1 to 16777216, got 0"),
        (lambda p: by_slots(p, 4, 1, 2, 1, 0), "num_slices must be 1 to 256, got 0"),
        (lambda p: by_slots(p, 4, 1, 3, 1, 2), "group_offset must be 4 to 2147483647, got 3"),
        (lambda p: by_phases(p, 0, [1, 1], 1), "num_microbatches must be"),
        (lambda p: by_phases(p, 2, [1, 1], 0), "group must be 1 to 16777216, got 0"),
        (lambda p: by_phases(p, 2, [1], 1), "warmup must hold one number for each of 2 devices"),
        (lambda p: by_phases(p, 2, [1, 3], 1), "warm-up must be 0 to 2, got 3"),
        (lambda p: by_phases(p, 2, [-1, 1], 1), "warm-up must be 0 to 2, got -1"),
        (lambda p: by_phases(p, 2, [1, 1], 1, [0]), "weight_delay must hold one number for each"),
        (lambda p: by_phases(p, 2, [1, 1], 1, [0, -1]), "weight delay must be 0 to 16777216, got"),
    ],
)
def test_bad_numbers_are_refused(make: Callable[[Placement], Plan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(Placement.linear(2))
