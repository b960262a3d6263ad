"""The check accepts exactly the plans that can run, and names the rule that others break."""

import random
import re
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pykern.plan import Action, Kind, Placement, Plan, PlanError, by_slots, check
from tests.plan.strategies import chain, valid_plans

ROOT = Path(__file__).parents[2]


def can_run(plan: Plan) -> bool:
    """Oracle: runs the rows of a complete plan by trial, knowing the chains alone."""
    chains = [chain(plan.num_stages, m)[::-1] for m in range(plan.num_microbatches)]
    rows = [list(row) for row in plan.rows]
    progress = True
    while progress:
        progress = False
        for row in rows:
            while row and chains[row[0].microbatch][-1] == row[0]:
                chains[row.pop(0).microbatch].pop()
                progress = True
    return not any(rows)


def refusal(plan: Plan) -> PlanError:
    with pytest.raises(PlanError) as caught:
        check(plan)
    return caught.value


def changed(plan: Plan, rows: list[list[Action]]) -> Plan:
    return Plan(plan.placement, plan.num_microbatches, rows)


def any_place(data: st.DataObject, plan: Plan) -> tuple[int, int]:
    places = [(d, i) for d, row in enumerate(plan.rows) for i in range(len(row))]
    return data.draw(st.sampled_from(places))


@given(valid_plans())
def test_every_valid_plan_passes(plan: Plan) -> None:
    assert can_run(plan)
    check(plan)
    check(plan.forward_only())


@given(valid_plans(), st.randoms(use_true_random=False))
def test_shuffled_rows_pass_exactly_if_they_can_run(plan: Plan, rng: random.Random) -> None:
    rows = [rng.sample(row, len(row)) for row in plan.rows]
    shuffled = changed(plan, rows)
    if can_run(shuffled):
        check(shuffled)
    else:
        assert refusal(shuffled).rule in {"P006", "P007"}


@given(valid_plans(), st.data())
def test_a_dropped_action_is_missed(plan: Plan, data: st.DataObject) -> None:
    device, position = any_place(data, plan)
    rows = [list(row) for row in plan.rows]
    dropped = rows[device].pop(position)
    assume(any(action.kind is dropped.kind for row in rows for action in row))
    error = refusal(changed(plan, rows))
    assert (error.rule, error.device, error.position) == ("P005", device, len(rows[device]))
    assert f"{dropped} is missing" in str(error)


@given(valid_plans(), st.data())
def test_a_repeated_action_is_found(plan: Plan, data: st.DataObject) -> None:
    device, position = any_place(data, plan)
    target = data.draw(st.integers(0, plan.num_devices - 1))
    rows = [list(row) for row in plan.rows]
    rows[target].append(rows[device][position])
    error = refusal(changed(plan, rows))
    assert error.rule == "P003"
    assert str(rows[device][position]) in str(error).splitlines()[0]


@given(valid_plans(), st.data())
def test_an_action_on_another_device_is_found(plan: Plan, data: st.DataObject) -> None:
    assume(plan.num_devices > 1)
    device, position = any_place(data, plan)
    target = data.draw(st.integers(0, plan.num_devices - 1).filter(lambda d: d != device))
    rows = [list(row) for row in plan.rows]
    rows[target].insert(0, rows[device].pop(position))
    error = refusal(changed(plan, rows))
    assert (error.rule, error.device, error.position) == ("P004", target, 0)
    assert f"belongs on device {device}" in str(error)


@given(valid_plans(), st.data())
def test_numbers_out_of_range_are_found(plan: Plan, data: st.DataObject) -> None:
    device, position = any_place(data, plan)
    old = plan.rows[device][position]
    beyond = data.draw(
        st.sampled_from(
            [
                Action(old.kind, plan.num_stages, old.microbatch),
                Action(old.kind, old.stage, plan.num_microbatches),
                Action(old.kind, 2**16 - 1, 2**32 - 1),
            ]
        )
    )
    rows = [list(row) for row in plan.rows]
    rows[device][position] = beyond
    error = refusal(changed(plan, rows))
    assert (error.rule, error.device, error.position) == ("P001", device, position)


@given(valid_plans(), st.data())
def test_kinds_that_cannot_run_are_refused(plan: Plan, data: st.DataObject) -> None:
    device, position = any_place(data, plan)
    old = plan.rows[device][position]
    kind = data.draw(st.sampled_from([k for k in Kind if k not in (Kind.F, Kind.B)]))
    rows = [list(row) for row in plan.rows]
    rows[device][position] = Action(kind, old.stage, old.microbatch)
    error = refusal(changed(plan, rows))
    assert (error.rule, error.device, error.position) == ("P002", device, position)


@given(valid_plans(), st.data())
def test_a_swap_across_a_dependency_on_one_device_is_found(plan: Plan, data: st.DataObject) -> None:
    device, position = any_place(data, plan)
    rows = [list(row) for row in plan.rows]
    action = rows[device][position]
    assume(action.kind is Kind.F)
    other = rows[device].index(Action(Kind.B, action.stage, action.microbatch))
    rows[device][position], rows[device][other] = rows[device][other], action
    error = refusal(changed(plan, rows))
    assert (error.rule, error.device) == ("P006", device)


def plan_of(placement: Placement, num_microbatches: int, *rows: str) -> Plan:
    actions = [[Action.parse(text) for text in row.split()] for row in rows]
    return Plan(placement, num_microbatches, actions)


def test_a_deadlock_between_devices_names_who_waits_for_what() -> None:
    plan = plan_of(Placement(2, [0, 1, 0]), 2, "2F0 0F0 0F1 2F1", "1F0 1F1")
    error = refusal(plan)
    assert (error.rule, error.device, error.position) == ("P007", 0, 0)
    assert str(error) == (
        "P007 (free of deadlock): device 0, position 0: 2F0 waits for 1F0, which never runs: "
        "device 1 is stopped at 1F0\n"
        "device 0 | 2F0 0F0 0F1 2F1\n"
        "           ^ here\n"
        "device 1 | 1F0 1F1"
    )


def test_a_plan_with_nothing_in_it_is_not_complete() -> None:
    assert refusal(Plan(Placement.linear(1), 2**24, [[]])).rule == "P005"


def test_the_arrow_of_a_large_plan_shows_only_what_is_around() -> None:
    plan = by_slots(Placement.linear(40), 100, group=1, group_offset=2)
    rows = [list(row) for row in plan.rows]
    rows[20][100] = Action(Kind.U, 20, 0)
    error = refusal(changed(plan, rows))
    lines = str(error).splitlines()
    assert len(lines) < 12
    assert max(len(line) for line in lines) < 120
    arrow = next(i for i, line in enumerate(lines) if "^" in line)
    assert lines[arrow - 1].startswith("device 20 | ... ")
    assert lines[arrow - 1][lines[arrow].index("^") :].startswith("20U0")


def test_a_million_actions_pass() -> None:
    plan = by_slots(Placement.linear(8), 62_500, group=1, group_offset=2)
    assert plan.num_actions == 1_000_000
    check(plan)


def test_the_documentation_lists_every_rule() -> None:
    header = (ROOT / "csrc/plan/check.hpp").read_text()
    page = (ROOT / "docs/plan-rules.md").read_text()
    rules = re.findall(r'\{"(P\d+)", "([^"]+)"\}', header)
    assert len(rules) == 7
    assert re.findall(r"^\| (P\d+) \| ([^|]+) \|", page, re.MULTILINE) == rules
