"""A plan is an immutable value with a text form."""

import pickle

import pytest
from hypothesis import given

from pykern.plan import Action, Kind, Placement, Plan, PlanError, by_slots, check, with_reductions
from tests.plan.strategies import valid_plans
from tests.support.plans import parsed


def small_plan() -> Plan:
    return by_slots(Placement.linear(2), num_microbatches=2, group=1, group_offset=2)


def test_counts_rows_and_text() -> None:
    plan = small_plan()
    counts = (plan.num_devices, plan.num_stages, plan.num_microbatches, plan.num_actions)
    assert counts == (2, 2, 2, 8)
    assert [[str(action) for action in row] for row in plan.rows] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]
    assert str(plan) == "device 0 | 0F0 0F1 0B0 0B1\ndevice 1 | 1F0 1B0 1F1 1B1"
    assert len(repr(plan)) < 100


def test_equality_and_pickle() -> None:
    plan = small_plan()
    assert pickle.loads(pickle.dumps(plan)) == plan == Plan(plan.placement, 2, plan.rows)
    assert plan != Plan(plan.placement, 3, plan.rows)
    assert plan != Plan(plan.placement, 2, plan.rows[::-1])


def test_equal_plans_have_equal_hashes() -> None:
    plan = small_plan()
    again = Plan(plan.placement, 2, plan.rows)
    assert len({plan, again, Plan(plan.placement, 2, plan.rows[::-1])}) == 2
    assert hash(plan) == hash(again)


def test_a_plan_cannot_be_changed() -> None:
    plan = small_plan()
    assert isinstance(plan.rows, tuple)
    assert isinstance(plan.rows[0], tuple)
    with pytest.raises(AttributeError):
        plan.rows = ()  # type: ignore[misc]


def test_forward_only_keeps_the_forwards_in_order() -> None:
    plan = small_plan().forward_only()
    check(plan)
    assert {action.kind for row in plan.rows for action in row} == {Kind.F}
    assert [str(action) for action in plan.rows[1]] == ["1F0", "1F1"]


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "num_rows", "message"),
    [
        (2, 0, 2, "num_microbatches must be 1 to 16777216, got 0"),
        (2, 2, 3, "rows must be 2, one for each device, got 3"),
        (
            1000,
            20000,
            1000,
            r"num_stages \* num_microbatches \* num_slices must be 1 to 16777216, got 20000000",
        ),
    ],
)
def test_bad_sizes_are_refused(
    num_stages: int, num_microbatches: int, num_rows: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(Placement.linear(num_stages), num_microbatches, [[]] * num_rows)


def test_wide_actions_keep_the_table_aligned() -> None:
    rows = [[Action(Kind.F, 0, 0), Action(Kind.F, 0, 10), Action(Kind.F, 0, 1)]]
    assert str(Plan(Placement.linear(1), 11, rows)) == "device 0 | 0F0  0F10 0F1"


def test_reductions_stand_behind_the_last_gradient_of_their_stage() -> None:
    rows = [["0F0", "1F1", "1B1", "0B0"], ["0F1", "1F0", "1B0", "0B1"]]
    actions = [[Action.parse(text) for text in row] for row in rows]
    plan = with_reductions(Plan(Placement.bidirectional(2), 2, actions))
    check(plan)
    assert [[str(action) for action in row] for row in plan.rows] == [
        ["0F0", "1F1", "1B1", "0B0", "0REDUCE0"],
        ["0F1", "1F0", "1B0", "1REDUCE0", "0B1"],
    ]
    assert with_reductions(plan) == plan
    assert with_reductions(small_plan()) == small_plan()
    over_peers = with_reductions(small_plan(), over_peers=True)
    assert [row[-1].kind for row in over_peers.rows] == [Kind.REDUCE, Kind.REDUCE]
    check(over_peers)
    forward_only = small_plan().forward_only()
    assert with_reductions(forward_only, over_peers=True) == forward_only
    assert with_reductions(small_plan().forward_only()) == small_plan().forward_only()


def test_an_update_before_the_last_gradient_leaves_no_place_for_a_reduction() -> None:
    rows = ["0F0 0B0 0U0 0F2 0B2", "0F1 0B1 0F3 0B3"]
    actions = parsed(rows)
    plan = Plan(Placement.replicated(2, [[0], [1]]), 4, actions)
    check(plan)
    with pytest.raises(PlanError, match="0U0 stands before 0REDUCE0"):
        with_reductions(plan)


@given(valid_plans())
def test_reductions_keep_any_plan_runnable(plan: Plan) -> None:
    reduced = with_reductions(plan)
    check(reduced)
    assert reduced.has(Kind.REDUCE) == (plan.placement.num_replicas > 1)
    kept = [[a for a in row if a.kind is not Kind.REDUCE] for row in reduced.rows]
    assert kept == [list(row) for row in plan.rows]
