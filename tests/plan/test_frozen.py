"""Plans of which some stages have nothing to train."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pykern import schedules
from pykern.plan import (
    Action,
    Costs,
    Kind,
    Memory,
    Placement,
    Plan,
    PlanError,
    by_list,
    check,
    check_lowered,
    costs_with_frozen,
    lower,
    peak_bytes,
    simulate,
    with_recompute,
    with_reductions,
    with_updates,
)
from pykern.plan.files import load_plan, save_plan
from tests.plan.oracle import Oracle, full_plans, times_for
from tests.plan.strategies import valid_plans
from tests.support.plans import plan_of

BACKWARDS = (Kind.B, Kind.I, Kind.W)
OF_BACKWARDS = (*BACKWARDS, Kind.R, Kind.REDUCE, Kind.U)


def frozen_in(data: st.DataObject, plan: Plan) -> list[int]:
    """Some stages, not all."""
    numbers = data.draw(st.sets(st.integers(0, plan.num_stages - 1)))
    assume(len(numbers) < plan.num_stages)
    return sorted(numbers)


def by_rule(plan: Plan, frozen: list[int]) -> list[list[Action]]:
    """The rows of the frozen plan, by a second implementation of the rule."""
    first = min(set(range(plan.num_stages)) - set(frozen))
    rows = []
    for row in plan.rows:
        left = [a for a in row if not (a.stage < first and a.kind in OF_BACKWARDS)]
        left = [a for a in left if not (a.stage in frozen and a.kind is Kind.W)]
        rows.append(
            [
                Action(Kind.B, a.stage, a.microbatch, a.slice)
                if a.stage in frozen and a.kind is Kind.I
                else a
                for a in left
            ]
        )
    return rows


@given(full_plans(), st.data())
def test_rows_follow_the_rule_and_pass(plan: Plan, data: st.DataObject) -> None:
    frozen = frozen_in(data, plan)
    found = plan.with_frozen(frozen)
    check(found)
    check_lowered(lower(found))
    assert [list(row) for row in found.rows] == by_rule(plan, frozen)
    assert found.first_trained == min(set(range(plan.num_stages)) - set(frozen))
    assert found.with_frozen(frozen) == found
    assert found.forward_only() == plan.forward_only()
    if not frozen:
        assert found == plan


@given(full_plans(), st.data())
def test_times_are_those_of_the_oracle(plan: Plan, data: st.DataObject) -> None:
    found = plan.with_frozen(frozen_in(data, plan))
    times = data.draw(times_for(found))
    oracle = Oracle(found, times)
    spans = [span for row in simulate(found, times.costs()).rows for span in row]
    assert [(s.start_ns, s.end_ns) for s in spans] == [
        (oracle.start(s.action), oracle.end(s.action)) for s in spans
    ]


@given(valid_plans(), st.data())
def test_a_plan_takes_no_longer_and_holds_no_more_when_stages_are_frozen(
    plan: Plan, data: st.DataObject
) -> None:
    frozen = frozen_in(data, plan)
    found = plan.with_frozen(frozen)
    costs = Costs(3, 6, 1, input_ns=4, weight_ns=2)
    cheaper = costs_with_frozen(costs, plan.num_stages, frozen)
    assert simulate(found, cheaper).makespan_ns <= simulate(plan, costs).makespan_ns
    memory = Memory(1.0, 0.5)
    pairs = zip(peak_bytes(found, memory), peak_bytes(plan, memory), strict=True)
    assert all(now <= before for now, before in pairs)


@given(valid_plans(), st.data())
def test_a_backward_that_is_dropped_is_missed_in_a_frozen_plan(
    plan: Plan, data: st.DataObject
) -> None:
    # One cell alone cannot tell a dropped backward from a frozen stage.
    assume(plan.num_microbatches * plan.num_slices > 1)
    found = plan.with_frozen(frozen_in(data, plan))
    rows = [list(row) for row in found.rows]
    places = [
        (d, i) for d, row in enumerate(rows) for i, a in enumerate(row) if a.kind in BACKWARDS
    ]
    device, position = data.draw(st.sampled_from(places))
    dropped = rows[device].pop(position)
    with pytest.raises(PlanError, match=f"{dropped} is missing") as caught:
        check(Plan(plan.placement, plan.num_microbatches, rows, plan.num_slices))
    assert caught.value.rule == "P005"


def test_the_stages_behind_a_backward_all_have_one() -> None:
    gap = plan_of(Placement.linear(3), 1, "0F0 0B0", "1F0", "2F0 2B0")
    with pytest.raises(PlanError, match="1B0 is missing"):
        check(gap)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0R0", "1F0 1B0"), "0R0 recomputes for a backward, and the stage has none"),
        (("0F0 0REDUCE0", "1F0 1B0"), "0REDUCE0 sums gradients of a backward, and the stage has"),
        (("0F0 0R0", "1F0"), "0R0 recomputes for a backward, and the plan has none"),
        (("0F0 0REDUCE0", "1F0 1REDUCE0"), "0REDUCE0 sums gradients of a backward, and the plan"),
    ],
)
def test_nothing_else_of_a_backward_stands_alone(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check(plan_of(Placement.linear(2), 1, *rows))


def test_reductions_are_of_what_trains() -> None:
    plan = with_reductions(schedules.one_f_one_b(3, 2).with_frozen([0]), over_peers=True)
    stages = [a.stage for row in plan.rows for a in row if a.kind is Kind.REDUCE]
    assert stages == [1, 2]


def test_only_what_has_a_backward_is_recomputed() -> None:
    plan = schedules.one_f_one_b(3, 2).with_frozen([0])
    with pytest.raises(ValueError, match="cells must be of stages with a backward, got 0R0"):
        with_recompute(plan, [Action.parse("0R0")], Costs(1, 2))
    assert with_recompute(plan, [Action.parse("1R0")], Costs(1, 2)).has(Kind.R)


def test_forwards_alone_do_not_count_in_a_list_schedule() -> None:
    plan = schedules.gpipe(2, 4)
    frozen = by_list(plan.with_frozen([0]), cap=1)
    assert [a.kind for a in frozen.rows[0]] == [Kind.F] * 4
    assert peak_bytes(frozen, Memory(1.0)) == [1.0, 1.0]


def test_shared_links_carry_no_gradient_that_nobody_reads() -> None:
    plan = plan_of(Placement(2, [0, 1, 0]), 1, "0F0 2F0 2B0", "1F0 1B0")
    costs = Costs(1, 2, message_bytes=8, bandwidth=1, shared_links=True)
    # F0 1, its message 8, F1 1, its message 8, F2 and B2 3, its message 8, B1 2.
    assert simulate(plan, costs).makespan_ns == 31


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([2], "stages must be"),
        ([-1], "stages must be"),
        ([0, 1], "stages must leave one to train, got all 2"),
    ],
)
def test_wrong_stages_are_refused(stages: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedules.gpipe(2, 2).with_frozen(stages)


def test_a_file_keeps_it(tmp_path: object) -> None:
    plan = schedules.zb_h1(4, 8).with_frozen([0, 1, 3])
    path = f"{tmp_path}/plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan


def test_torch_is_told_of_the_actions_alone(tmp_path: object) -> None:
    plan = schedules.one_f_one_b(4, 8).with_frozen([0])
    save_plan(plan, f"{tmp_path}/plan.csv")
    with pytest.raises(ValueError, match=r"must have a backward of every stage .* from stage 1 on"):
        save_plan(plan, f"{tmp_path}/plan.comms.csv", transfers=True)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="the runtime of an older torch is another")
def test_torch_does_not_run_plans_with_frozen_stages() -> None:
    plan = schedules.one_f_one_b(4, 8).with_frozen([0])
    with pytest.raises(ValueError, match=r"must have a backward of every stage .* from stage 1 on"):
        plan.to_torch([])


def test_costs_of_stages_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match="stages must be 0 to 3, got 7"):
        costs_with_frozen(Costs(1.0, 2.0), 4, [7])


@pytest.mark.parametrize("delay", [0, 2])
def test_updates_are_of_the_stages_that_train(delay: int) -> None:
    plan = with_updates(schedules.one_f_one_b(4, 8).with_frozen([0, 1]), 4, delay)
    updated = {action.stage for row in plan.rows for action in row if action.kind is Kind.U}
    assert updated == {2, 3}
