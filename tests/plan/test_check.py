"""The check accepts exactly the plans that can run, and names the rule that others break."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pykern.plan import (
    Action,
    Kind,
    Memory,
    Placement,
    Plan,
    PlanError,
    by_slots,
    check,
    check_memory,
    peak_bytes,
)
from tests.plan.strategies import Shape, valid_plans, valid_plans_with_shape
from tests.support.plans import parsed, plan_of

ROOT = Path(__file__).parents[2]


def refusal(plan: Plan) -> PlanError:
    with pytest.raises(PlanError) as caught:
        check(plan)
    return caught.value


def changed(plan: Plan, rows: list[list[Action]]) -> Plan:
    return Plan(plan.placement, plan.num_microbatches, rows, plan.num_slices)


def any_place(data: st.DataObject, plan: Plan) -> tuple[int, int]:
    places = [(d, i) for d, row in enumerate(plan.rows) for i in range(len(row))]
    return data.draw(st.sampled_from(places))


@given(valid_plans_with_shape())
def test_every_valid_plan_passes(made: tuple[Plan, Shape]) -> None:
    plan, shape = made
    assert shape.can_run(plan)
    check(plan)
    check(plan.forward_only())


@given(valid_plans_with_shape(), st.randoms(use_true_random=False), st.integers(1, 4))
def test_reordered_rows_pass_exactly_if_they_can_run(
    made: tuple[Plan, Shape], rng: random.Random, num_swaps: int
) -> None:
    plan, shape = made
    rows = [list(row) for row in plan.rows]
    for _ in range(num_swaps):
        row = rng.choice([row for row in rows if row])
        i, j = rng.randrange(len(row)), rng.randrange(len(row))
        row[i], row[j] = row[j], row[i]
    shuffled = changed(plan, rows)
    if shape.can_run(shuffled):
        check(shuffled)
    else:
        assert refusal(shuffled).rule in {"P006", "P007"}


@given(valid_plans(), st.data())
def test_a_dropped_action_is_missed(plan: Plan, data: st.DataObject) -> None:
    device, position = any_place(data, plan)
    rows = [list(row) for row in plan.rows]
    dropped = rows[device].pop(position)
    forwards = dropped.kind is Kind.F
    assume(forwards or any(action.kind is not Kind.F for row in rows for action in row))
    # Without the only backward of the first stage, that has nothing to train.
    assume(forwards or dropped.kind is not Kind.B or changed(plan, rows).first_trained == 0)
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
    target = data.draw(st.sampled_from([d for d in range(plan.num_devices) if d != device]))
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
                Action(old.kind, old.stage, old.microbatch, plan.num_slices),
                Action(old.kind, 2**16 - 1, 2**32 - 1, 255),
                Action(Kind.REDUCE, old.stage, 1),
                Action(Kind.REDUCE, old.stage, 0, 1),
            ]
        )
    )
    rows = [list(row) for row in plan.rows]
    rows[device][position] = beyond
    error = refusal(changed(plan, rows))
    assert (error.rule, error.device, error.position) == ("P001", device, position)


@given(valid_plans(), st.data(), st.sampled_from([Kind.COPY_F, Kind.COPY_B]))
def test_transfers_are_not_authored(plan: Plan, data: st.DataObject, kind: Kind) -> None:
    device, position = any_place(data, plan)
    old = plan.rows[device][position]
    rows = [list(row) for row in plan.rows]
    rows[device][position] = Action(kind, old.stage, old.microbatch)
    error = refusal(changed(plan, rows))
    assert (error.rule, error.device, error.position) == ("P002", device, position)


@given(valid_plans(), st.data())
def test_a_backward_is_whole_or_split(plan: Plan, data: st.DataObject) -> None:
    places = [
        (d, i, action)
        for d, row in enumerate(plan.rows)
        for i, action in enumerate(row)
        if action.kind is not Kind.F
    ]
    device, _, old = data.draw(st.sampled_from(places))
    other = data.draw(st.sampled_from([Kind.I, Kind.W])) if old.kind is Kind.B else Kind.B
    rows = [list(row) for row in plan.rows]
    rows[device].append(Action(other, old.stage, old.microbatch, old.slice))
    assert refusal(changed(plan, rows)).rule == "P008"


@given(valid_plans(), st.data())
def test_a_swap_across_a_dependency_on_one_device_is_found(plan: Plan, data: st.DataObject) -> None:
    device, position = any_place(data, plan)
    rows = [list(row) for row in plan.rows]
    action = rows[device][position]
    assume(action.kind is Kind.F)
    place = (action.stage, action.microbatch, action.slice)
    backwards = [Action(kind, *place) for kind in (Kind.B, Kind.I)]
    other = next(i for i, found in enumerate(rows[device]) if found in backwards)
    rows[device][position], rows[device][other] = rows[device][other], action
    error = refusal(changed(plan, rows))
    assert (error.rule, error.device) == ("P006", device)


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


@pytest.mark.parametrize(
    ("rule", "position", "row"),
    [
        (None, None, "0F0 0R0 0B0"),
        (None, None, "0F0 0OFFLOAD0 0LOAD0 0R0 0I0 0W0 0U0"),
        (None, None, "0F0 0B0 0REDUCE0 0U0"),
        ("P005", 3, "0F0 0OFFLOAD0 0B0"),
        ("P005", 3, "0F0 0LOAD0 0B0"),
        ("P006", 0, "0R0 0F0 0B0"),
        ("P006", 1, "0F0 0B0 0R0"),
        ("P006", 1, "0F0 0LOAD0 0OFFLOAD0 0B0"),
        ("P006", 2, "0F0 0OFFLOAD0 0B0 0LOAD0"),
        ("P006", 2, "0F0 0OFFLOAD0 0R0 0LOAD0 0B0"),
        ("P006", 1, "0F0 0W0 0I0"),
        ("P006", 1, "0F0 0REDUCE0 0B0"),
        ("P006", 2, "0F0 0I0 0REDUCE0 0W0"),
        ("P006", 1, "0F0 0U0 0B0"),
        ("P006", 2, "0F0 0B0 0U0 0REDUCE0"),
        ("P006", 0, "0U0 0F0 0I0 0W0"),
        ("P005", 0, "0U0 0F0"),
        ("P005", 1, "0F0 0U0"),
        ("P005", 1, "0F0 0REDUCE0"),
    ],
)
def test_the_order_of_the_other_kinds(rule: str | None, position: int | None, row: str) -> None:
    plan = plan_of(Placement.linear(1), 1, row)
    if rule is None:
        check(plan)
    else:
        error = refusal(plan)
        assert (error.rule, error.position) == (rule, position)


@pytest.mark.parametrize(
    ("position", "row"),
    [
        (None, "0F0 0F0.1 0I0.1 0I0 0W0 0W0.1 0U0"),
        (None, "0F0 0F0.1 0I0.1 0W0.1 0B0 0U0"),
        (None, "0F0 0F0.1 0B0.1 0B0 0U0"),
        (5, "0F0 0F0.1 0I0.1 0I0 0W0 0U0 0W0.1"),
        (4, "0F0 0F0.1 0I0.1 0B0 0U0 0W0.1"),
        (4, "0F0 0F0.1 0I0.1 0W0.1 0U0 0B0"),
    ],
)
def test_an_update_waits_for_every_slice(position: int | None, row: str) -> None:
    actions = [Action.parse(word) for word in row.split()]
    plan = Plan(Placement.linear(1), 1, [actions], num_slices=2)
    if position is None:
        check(plan)
    else:
        error = refusal(plan)
        assert (error.rule, error.position) == ("P006", position)


def test_a_reduction_waits_for_every_replica() -> None:
    placement = Placement.bidirectional(2)
    rows = "0F0 1F1 1B1 0B0 0REDUCE0", "0F1 1F0 1B0 0B1 1REDUCE0"
    check(plan_of(placement, 2, *rows))
    early = "0F1 1F0 1B0 1REDUCE0 0B1"
    assert (
        refusal(plan_of(placement, 2, rows[0].replace("1B1 ", "") + " 1B1", early)).rule == "P007"
    )
    assert refusal(plan_of(placement, 2, rows[0], rows[1].replace(" 1REDUCE0", ""))).rule == "P005"


def paired(rows: list[str], *overlaps: list[int]) -> Plan:
    actions = parsed(rows)
    return Plan(Placement.linear(len(rows)), 2, actions, overlaps=overlaps)


def test_overlapped_pairs() -> None:
    rows = ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    check(paired(rows, [1], []))
    # Both start together, so what either of them waits for must not wait for the other.
    late = paired(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], [1], [1])
    assert refusal(late).rule == "P007"
    for bad in ([0], [2]):
        error = refusal(paired(rows, bad, []))
        assert (error.rule, error.device, error.position) == ("P009", 0, bad[0])
    same = refusal(paired(["0F0 0B0 0F1 0B1"], [0]))
    assert same.rule == "P009"
    for starts in ([3], [0, 1], [1, 0], [-1]):
        with pytest.raises((ValueError, TypeError)):
            paired(rows, starts, [])


def test_r_has_its_place_between_f_and_b() -> None:
    check(plan_of(Placement.linear(1), 1, "0F0 0R0 0I0 0W0"))
    for row, rule, position in (
        ("0R0 0F0 0B0", "P006", 0),
        ("0F0 0B0 0R0", "P006", 1),
        ("0F0 0I0 0R0 0W0", "P006", 1),
        ("0F0 0R0 0R0 0B0", "P003", 2),
        ("0F0 0R0", "P005", 1),
    ):
        error = refusal(plan_of(Placement.linear(1), 1, row))
        assert (error.rule, error.device, error.position) == (rule, 0, position)
    with pytest.raises(PlanError, match="0R0 recomputes for a backward, and the plan has none"):
        check(plan_of(Placement.linear(1), 1, "0F0 0R0"))


def test_what_a_device_holds() -> None:
    plan = plan_of(Placement.linear(1), 2, "0F0 0F1 0I0 0I1 0W0 0W1")
    assert peak_bytes(plan, Memory(8)) == [16]
    assert peak_bytes(plan, Memory([8], [3])) == [16]
    late = plan_of(Placement.linear(1), 3, "0F0 0I0 0F1 0I1 0F2 0I2 0W0 0W1 0W2")
    assert peak_bytes(late, Memory(8)) == [24]
    assert peak_bytes(late, Memory(8, 3)) == [14]
    assert peak_bytes(late, Memory(8, 0)) == [8]
    recomputed = plan_of(Placement.linear(1), 2, "0F0 0F1 0R0 0B0 0R1 0B1")
    assert peak_bytes(recomputed, Memory(8, boundary_bytes=1)) == [9]
    offloaded = plan_of(Placement.linear(1), 2, "0F0 0OFFLOAD0 0F1 0B1 0LOAD0 0B0")
    assert peak_bytes(offloaded, Memory(8)) == [8]


@pytest.mark.parametrize(
    ("row", "kept_bytes", "peak"),
    [
        ("0F0 0F1 0R0 0B0 0R1 0B1", 0, 5 + 1),
        ("0F0 0F1 0R0 0R1 0B0 0B1", 0, 5 + 5),
        ("0F0 0F1 0R0 0B0 0B1", 0, 5 + 8),  # 0F1 has no R and keeps everything
        ("0F0 0F1 0R0 0I0 0R1 0I1 0W0 0W1", 3, 3 + 5),
        ("0F0 0F1 0R0 0I0 0R1 0I1 0W0 0W1", 6, 6 + 6),  # W takes more than R has rebuilt for I
        ("0F0 0OFFLOAD0 0F1 0R1 0B1 0LOAD0 0R0 0B0", 0, 5),
        ("0F0 0OFFLOAD0 0F1 0B1 0LOAD0 0R0 0B0", 0, 8),
    ],
)
def test_what_r_rebuilds_may_be_less_than_what_f_holds(
    row: str, kept_bytes: float, peak: float
) -> None:
    plan = plan_of(Placement.linear(1), 2, row)
    memory = Memory(8, kept_bytes, boundary_bytes=1, rebuilt_bytes=5)
    assert peak_bytes(plan, memory) == [peak]
    check_memory(plan, memory, cap_bytes=peak)
    with pytest.raises(PlanError, match="P010"):
        check_memory(plan, memory, cap_bytes=peak - 0.5)


def test_the_memory_cap_names_the_first_action_beyond_it() -> None:
    plan = by_slots(Placement.linear(4), 8, group=1, group_offset=2)
    assert peak_bytes(plan, Memory([4, 3, 2, 1])) == [16, 9, 4, 1]
    check_memory(plan, Memory([4, 3, 2, 1]), cap_bytes=16)
    with pytest.raises(PlanError, match=r"0F3 makes the device hold 16.* cap is 15.5") as caught:
        check_memory(plan, Memory([4, 3, 2, 1]), cap_bytes=15.5)
    assert (caught.value.rule, caught.value.device, caught.value.position) == ("P010", 0, 3)


def test_the_memory_of_a_plan_that_cannot_run_is_not_asked_for() -> None:
    wild = Plan(Placement.linear(1), 1, [[Action(Kind.F, 60_000, 4_000_000_000)]])
    with pytest.raises(PlanError, match="P001"):
        check_memory(wild, Memory(1), cap_bytes=1)
    with pytest.raises(PlanError, match="P001"):
        peak_bytes(wild, Memory(1))


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        (lambda: Memory(-1), "activation_bytes must be finite and not negative, got -1"),
        (lambda: Memory([1, float("nan")]), "activation_bytes of stage 1 must be finite"),
        (lambda: Memory(1, rebuilt_bytes=-1), "rebuilt_bytes must be finite and not negative"),
        (lambda: peak_bytes(by_slots(Placement.linear(2), 1, 1, 2), Memory([1])), "of 2 stages"),
        (
            lambda: peak_bytes(
                by_slots(Placement.linear(2), 1, 1, 2), Memory(1, rebuilt_bytes=[1])
            ),
            "rebuilt_bytes .* each of 2 stages",
        ),
    ],
)
def test_bad_sizes_are_refused(memory: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory()


def test_a_plan_with_nothing_in_it_is_not_complete() -> None:
    assert refusal(Plan(Placement.linear(1), 2**24, [[]])).rule == "P005"


def test_the_arrow_of_a_large_plan_shows_only_what_is_around() -> None:
    plan = by_slots(Placement.linear(40), 100, group=1, group_offset=2)
    rows = [list(row) for row in plan.rows]
    rows[20][100] = Action(Kind.F, 20, 500)
    error = refusal(changed(plan, rows))
    lines = str(error).splitlines()
    assert len(lines) < 12
    assert max(len(line) for line in lines) < 120
    arrow = next(i for i, line in enumerate(lines) if "^" in line)
    assert lines[arrow - 1].startswith("device 20 | ... ")
    assert lines[arrow - 1][lines[arrow].index("^") :].startswith("20F500")


def test_a_million_actions_pass() -> None:
    plan = by_slots(Placement.linear(8), 62_500, group=1, group_offset=2)
    assert plan.num_actions == 1_000_000
    check(plan)


def test_the_documentation_lists_every_rule() -> None:
    header = (ROOT / "csrc/plan/check.hpp").read_text()
    page = (ROOT / "docs/plan-rules.md").read_text()
    rules = re.findall(r'\{"(P\d+)", "([^"]+)"\}', header)
    assert len(rules) == 11
    assert re.findall(r"^\| (P\d+) \| ([^|]+) \|", page, re.MULTILINE) == rules
