"""R added to a plan: where each goes, that nothing else moves, what it costs, what is refused."""

from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern import schedules
from pykern.plan import (
    Action,
    Costs,
    Kind,
    Memory,
    Placement,
    Plan,
    check,
    peak_bytes,
    simulate,
    with_recompute,
    with_reductions,
    with_updates,
)
from tests.plan.oracle import full_plans, times_for
from tests.support.plans import parsed

COSTS = Costs(1, 2)


def plan_of(*rows: str) -> Plan:
    actions = parsed(rows)
    microbatches = {action.microbatch for row in actions for action in row}
    return Plan(Placement.linear(len(rows)), len(microbatches), actions)


def cells_of(text: str) -> list[Action]:
    return [Action.parse(cell) for cell in text.split()]


def all_cells(plan: Plan) -> list[Action]:
    numbers = range(plan.num_microbatches)
    return [Action(Kind.R, s, m) for s in range(plan.num_stages) for m in numbers]


def rows_of(plan: Plan) -> list[str]:
    return [" ".join(map(str, row)) for row in plan.rows]


def test_r_fills_waits_and_what_does_not_fit_is_right_before_its_backward() -> None:
    plan = schedules.one_f_one_b(4, 4)
    assert rows_of(with_recompute(plan, all_cells(plan), COSTS, Memory(1))) == [
        "0F0 0F1 0F2 0F3 0R0 0R1 0R2 0R3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1R0 1R1 1R2 1B0 1F3 1B1 1R3 1B2 1B3",
        "2F0 2F1 2R0 2R1 2B0 2F2 2B1 2F3 2R2 2B2 2R3 2B3",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
    ]


def test_a_wait_that_is_too_short_is_filled_only_where_the_step_ends_earlier() -> None:
    # 0B0 waits from 2 to 4, and nothing waits for it but 0B1.
    plan = plan_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    result = with_recompute(plan, cells_of("0R1"), Costs(1, 2, recompute_ns=2.5))
    assert rows_of(result)[0] == "0F0 0F1 0R1 0B0 0B1"
    # 1B0 waits from 3 to 5, all that follows waits for it, and then 1F2 waits from 7 to 10.
    chain = plan_of("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1F1 1B0 1F2 1B1 1B2", "2F0 2B0 2F1 2B1 2F2 2B2")
    short = with_recompute(chain, cells_of("1R1"), Costs(1, 2, recompute_ns=2))
    assert rows_of(short)[1] == "1F0 1F1 1R1 1B0 1F2 1B1 1B2"
    long = with_recompute(chain, cells_of("1R1"), Costs(1, 2, recompute_ns=3))
    assert rows_of(long)[1] == "1F0 1F1 1B0 1R1 1F2 1B1 1B2"


def test_what_is_due_first_goes_first() -> None:
    plan = schedules.gpipe(2, 3)
    reversed_row = [*plan.rows[0][:3], *plan.rows[0][:2:-1]]
    backward = [*plan.rows[1][:3], *plan.rows[1][:2:-1]]
    last_first = Plan(plan.placement, 3, [reversed_row, backward])
    assert rows_of(with_recompute(last_first, all_cells(last_first), COSTS, Memory(1))) == [
        "0F0 0F1 0F2 0R1 0R0 0B2 0B1 0B0",
        "1F0 1F1 1F2 1B2 1R1 1B1 1R0 1B0",
    ]


@pytest.mark.parametrize(
    ("cap_bytes", "first"),
    [
        (32, "0F0 0F1 0F2 0F3 0R0 0R1 0R2 0R3 0B0 0B1 0B2 0B3"),
        (31, "0F0 0F1 0F2 0F3 0R0 0R1 0R2 0B0 0R3 0B1 0B2 0B3"),
        (18, "0F0 0F1 0F2 0F3 0R0 0R1 0B0 0R2 0B1 0R3 0B2 0B3"),
        (11, "0F0 0F1 0F2 0F3 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3"),
        (0, "0F0 0F1 0F2 0F3 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3"),
    ],
)
def test_r_is_as_early_as_memory_allows(cap_bytes: float, first: str) -> None:
    plan = schedules.one_f_one_b(4, 4)
    memory = Memory(8, boundary_bytes=1)
    result = with_recompute(plan, all_cells(plan), COSTS, memory, cap_bytes)
    assert rows_of(result)[0] == first
    assert peak_bytes(result, memory)[0] <= max(cap_bytes, 8 + 3)


@pytest.mark.parametrize(
    ("cap_bytes", "first"),
    [
        (16, "0F0 0F1 0F2 0F3 0R0 0R1 0R2 0R3 0B0 0B1 0B2 0B3"),
        (15, "0F0 0F1 0F2 0F3 0R0 0R1 0R2 0B0 0R3 0B1 0B2 0B3"),
        (10, "0F0 0F1 0F2 0F3 0R0 0R1 0B0 0R2 0B1 0R3 0B2 0B3"),
        (7, "0F0 0F1 0F2 0F3 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3"),
    ],
)
def test_more_r_are_early_where_they_rebuild_less(cap_bytes: float, first: str) -> None:
    plan = schedules.one_f_one_b(4, 4)
    memory = Memory(8, boundary_bytes=1, rebuilt_bytes=4)
    result = with_recompute(plan, all_cells(plan), COSTS, memory, cap_bytes)
    assert rows_of(result)[0] == first
    assert peak_bytes(result, memory)[0] <= cap_bytes


@pytest.mark.parametrize(("name", "most"), [("one_f_one_b", 2), ("gpipe", 1), ("interleaved", 1)])
def test_without_sizes_few_are_held_and_the_step_is_as_short(name: str, most: int) -> None:
    plan = schedules.by_name[name](4, 8)
    early = with_recompute(plan, all_cells(plan), COSTS, Memory(1))
    few = with_recompute(plan, all_cells(plan), COSTS)
    assert max(peak_bytes(few, Memory(1))) == most < max(peak_bytes(early, Memory(1)))
    makespan_ns = simulate(early, COSTS).makespan_ns
    assert simulate(few, COSTS).makespan_ns == makespan_ns
    fewer = with_recompute(plan, all_cells(plan), COSTS, Memory(1), most - 1)
    assert simulate(fewer, COSTS).makespan_ns > makespan_ns or most == 1


def test_memory_is_looked_at_up_to_the_backward_that_frees_it() -> None:
    # Before 0B1 the device holds 5 + 8, but before 0B0, without an early 0R0, 5 + 3 * 8.
    plan = plan_of(
        "0F0 0F1 0B1 0F2 0F3 0F4 0B0 0B2 0B3 0B4", "1F0 1F1 1B1 1B0 1F2 1B2 1F3 1B3 1F4 1B4"
    )
    memory = Memory(8, boundary_bytes=5)
    early = with_recompute(plan, cells_of("0R0"), COSTS, memory, cap_bytes=32)
    assert rows_of(early)[0] == "0F0 0F1 0R0 0B1 0F2 0F3 0F4 0B0 0B2 0B3 0B4"
    late = with_recompute(plan, cells_of("0R0"), COSTS, memory, cap_bytes=31)
    assert rows_of(late)[0] == "0F0 0F1 0B1 0F2 0F3 0F4 0R0 0B0 0B2 0B3 0B4"


def test_a_cell_whose_backward_follows_at_once_gets_none() -> None:
    for plan in (schedules.one_f_one_b(3, 5), schedules.zb_h1(3, 5)):
        cells = [cell for cell in all_cells(plan) if cell.stage == 2]
        assert with_recompute(plan, cells, COSTS) == plan


def test_no_r_comes_between_the_two_of_a_pair() -> None:
    plan = schedules.dualpipe_v(4, 8)
    result = with_recompute(plan, all_cells(plan), Costs(1, 2, overlap=1))
    for before, after, old, new in zip(
        plan.rows, result.rows, plan.overlaps, result.overlaps, strict=True
    ):
        pairs = [before[start : start + 2] for start in old]
        assert [after[start : start + 2] for start in new] == pairs


def test_r_waits_for_what_comes_back_from_host_memory() -> None:
    plan = plan_of("0F0 0F1 0OFFLOAD0 0OFFLOAD1 0LOAD1 0B1 0LOAD0 0B0", "1F0 1F1 1B1 1B0")
    # 0B1 waits, and 0R0 would have the time, but not its input.
    result = with_recompute(plan, cells_of("0R0 0R1"), COSTS)
    assert rows_of(result)[0] == "0F0 0F1 0OFFLOAD0 0OFFLOAD1 0LOAD1 0R1 0B1 0LOAD0 0R0 0B0"


def test_reductions_and_updates_go_with_it() -> None:
    chimera = schedules.chimera(2, 4)
    reduced = with_reductions(with_recompute(chimera, all_cells(chimera), COSTS))
    assert without(reduced.rows, all_cells(chimera)) == [
        list(row) for row in with_reductions(chimera).rows
    ]
    plan = schedules.one_f_one_b(3, 6)
    updated = with_updates(with_recompute(plan, all_cells(plan), COSTS), 2, 0)
    assert without(updated.rows, all_cells(plan)) == [
        list(row) for row in with_updates(plan, 2, 0).rows
    ]


def backward_of(plan: Plan, cell: Action) -> Action:
    kinds = (Kind.B, Kind.I)
    actions = [Action(kind, cell.stage, cell.microbatch) for kind in kinds]
    [backward] = [action for row in plan.rows for action in row if action in actions]
    return backward


def needed(plan: Plan, cells: Iterable[Action]) -> list[Action]:
    """Those whose backward does not follow their forward at once."""
    neighbours = {pair for row in plan.rows for pair in pairwise(row)}
    forward = {cell: Action(Kind.F, cell.stage, cell.microbatch) for cell in cells}
    return [c for c in cells if (forward[c], backward_of(plan, c)) not in neighbours]


def with_each_when_due(plan: Plan, cells: Iterable[Action]) -> Plan:
    """Written anew: every R right before its B or I, or before the pair that this is in."""
    recompute = {backward_of(plan, cell): cell for cell in cells}
    rows, overlaps = [], []
    for row, starts in zip(plan.rows, plan.overlaps, strict=True):
        longer: list[Action] = []
        pairs: list[int] = []
        position = 0
        while position < len(row):
            slot = row[position : position + (2 if position in starts else 1)]
            longer += [recompute[action] for action in slot if action in recompute]
            if len(slot) == 2:
                pairs.append(len(longer))
            longer += slot
            position += len(slot)
        rows.append(longer)
        overlaps.append(pairs)
    return Plan(plan.placement, plan.num_microbatches, rows, overlaps=overlaps)


@st.composite
def given_cells(draw: st.DrawFn) -> tuple[Plan, list[Action]]:
    """A plan with everything that a row may hold, and cells of which it has no R."""
    plan = draw(full_plans().filter(lambda plan: plan.num_slices == 1))
    there = {action for row in plan.rows for action in row}
    cells = [cell for cell in all_cells(plan) if cell not in there]
    return plan, draw(st.lists(st.sampled_from(cells), unique=True)) if cells else []


def without(rows: Iterable[tuple[Action, ...]], cells: list[Action]) -> list[list[Action]]:
    return [[action for action in row if action not in cells] for row in rows]


@given(st.data())
def test_any_cells_of_any_plan(data: st.DataObject) -> None:
    plan, cells = data.draw(given_cells())
    costs = data.draw(times_for(plan)).costs()
    result = with_recompute(plan, cells, costs)
    check(result)
    added = needed(plan, cells)
    there = [action for row in result.rows for action in row]
    assert all(there.count(cell) == 1 for cell in added)
    assert without(result.rows, added) == [list(row) for row in plan.rows]
    assert [len(starts) for starts in result.overlaps] == [len(s) for s in plan.overlaps]
    due = with_each_when_due(plan, added)
    assert simulate(result, costs).makespan_ns <= simulate(due, costs).makespan_ns


@given(st.data())
def test_the_cap_holds_where_r_when_due_holds_it(data: st.DataObject) -> None:
    plan, cells = data.draw(given_cells())
    sizes = st.lists(st.integers(0, 9), min_size=plan.num_stages, max_size=plan.num_stages)
    memory = Memory(*(data.draw(sizes) for _ in range(4)))
    cap_bytes = data.draw(st.integers(0, 60))
    due = peak_bytes(with_each_when_due(plan, needed(plan, cells)), memory)
    result = with_recompute(plan, cells, COSTS, memory, cap_bytes)
    for held, least in zip(peak_bytes(result, memory), due, strict=True):
        assert held <= max(cap_bytes, least)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda plan: with_recompute(plan, cells_of("0F1"), COSTS),
            "cells must be R actions, got 0F1",
        ),
        (
            lambda plan: with_recompute(plan, cells_of("2R0"), COSTS),
            "cells must be within the plan's 2 .* got 2R0",
        ),
        (lambda plan: with_recompute(plan, cells_of("0R4"), COSTS), "4 microbatches, got 0R4"),
        (
            lambda plan: with_recompute(plan, [Action(Kind.R, 0, 0, 1)], COSTS),
            "cells must be within the plan's .* got",
        ),
        (
            lambda plan: with_recompute(plan, cells_of("0R1 0R1"), COSTS),
            "cells must be given once, got 0R1",
        ),
        (
            lambda plan: with_recompute(
                with_recompute(plan, cells_of("0R1"), COSTS), cells_of("0R1"), COSTS
            ),
            "cells must be new to the plan, got 0R1",
        ),
        (
            lambda plan: with_recompute(plan.forward_only(), cells_of("0R0"), COSTS),
            "plan must have backwards to recompute for, got one without",
        ),
        (
            lambda _: with_recompute(schedules.seq1f1b(2, 2), cells_of("0R0"), COSTS),
            "plan must have whole microbatches to be recomputed, got 2 slices",
        ),
        (
            lambda plan: with_recompute(plan, [], COSTS, None, 5),
            "memory must be given beside cap_bytes, got cap_bytes=5",
        ),
        (
            lambda plan: with_recompute(plan, [], COSTS, Memory(1), float("nan")),
            "cap_bytes must be at least 0, got nan",
        ),
        (lambda plan: with_recompute(plan, [], COSTS, Memory([1])), "each of 2 stages"),
        (lambda plan: with_recompute(plan, [], Costs([1], 2)), "each of 2 stages"),
        (lambda _: with_recompute(plan_of("0B0 0F0"), [], COSTS), "P006"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[Plan], Plan], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(schedules.one_f_one_b(2, 4))
