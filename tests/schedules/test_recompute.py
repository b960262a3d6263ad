"""The cost of recompute in the catalogue: nothing in 1F1B's cool-down, and how much elsewhere."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from pykern import schedules
from pykern.plan import (
    Action,
    Costs,
    Kind,
    Memory,
    Plan,
    bubbles,
    check,
    check_lowered,
    check_memory,
    critical_path,
    lower,
    simulate,
    weight_versions,
    with_recompute,
)

PAGE = Path(__file__).parents[2] / "docs/recompute.md"
COSTS = Costs(1, 2)


def cells_of(plan: Plan) -> list[Action]:
    numbers = range(plan.num_microbatches)
    return [Action(Kind.R, s, m) for s in range(plan.num_stages) for m in numbers]


def cool_down_of(plan: Plan) -> list[Action]:
    """The last P - 1 - s microbatches of stage s, whose backwards come one forward apart."""
    last_stage, end = plan.num_stages - 1, plan.num_microbatches
    return [cell for cell in cells_of(plan) if cell.microbatch >= end - (last_stage - cell.stage)]


def time_of(plan: Plan) -> float:
    return simulate(plan, COSTS).makespan_ns


def time_inside_backward(plan: Plan, cells: Iterable[Action]) -> float:
    """With backwards of 3 for these cells: an I of 3 and a W of nothing for each such B."""
    halved = {Action(Kind.B, cell.stage, cell.microbatch) for cell in cells}
    rows = [
        [
            Action(kind, action.stage, action.microbatch)
            for action in row
            for kind in ((Kind.I, Kind.W) if action in halved else (action.kind,))
        ]
        for row in plan.rows
    ]
    longer = Plan(plan.placement, plan.num_microbatches, rows)
    return simulate(longer, Costs(1, 2, input_ns=3, weight_ns=0)).makespan_ns


def with_r_on_the_last_stage(plan: Plan) -> Plan:
    """Where R frees nothing, and where the planner therefore has none."""
    rows = [list(row) for row in plan.rows]
    rows[-1] = [
        each
        for action in rows[-1]
        for each in (
            [Action(Kind.R, action.stage, action.microbatch), action]
            if action.kind is Kind.B
            else [action]
        )
    ]
    return Plan(plan.placement, plan.num_microbatches, rows)


SIZES = [(4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32), (8, 64)]


def table() -> str:
    """The time that recompute adds to the step of 1F1B, as the page shows it."""
    lines = []
    for num_devices, num_microbatches in SIZES:
        plan = schedules.one_f_one_b(num_devices, num_microbatches)
        cells, cool_down = cells_of(plan), cool_down_of(plan)
        own = with_recompute(plan, cells, COSTS)
        times = [
            time_inside_backward(plan, cells),
            time_of(with_r_on_the_last_stage(own)),
            time_of(own),
            time_of(with_recompute(plan, cool_down, COSTS)),
            time_inside_backward(plan, cool_down),
        ]
        added = [f"{100 * (time / time_of(plan) - 1):+.1f} %" for time in times]
        lines.append(f"| {num_devices} | {num_microbatches} | {' | '.join(added)} |")
    return "\n".join(lines)


def test_the_page_shows_what_the_simulator_says() -> None:
    assert table() in PAGE.read_text()


@pytest.mark.parametrize(("num_devices", "num_microbatches"), SIZES)
def test_recompute_in_the_cool_down_is_free(num_devices: int, num_microbatches: int) -> None:
    plan = schedules.one_f_one_b(num_devices, num_microbatches)
    cells = cool_down_of(plan)
    assert len(cells) == num_devices * (num_devices - 1) // 2
    result = with_recompute(plan, cells, COSTS)
    assert result.num_actions == plan.num_actions + len(cells)
    assert time_of(result) == time_of(plan) == 3 * (num_microbatches + num_devices - 1)
    assert time_inside_backward(plan, cells) == time_of(plan) + num_devices - 1


@pytest.mark.parametrize(("num_devices", "num_microbatches"), SIZES)
def test_as_an_action_recompute_saves_a_forward_for_each_device(
    num_devices: int, num_microbatches: int
) -> None:
    plan = schedules.one_f_one_b(num_devices, num_microbatches)
    result = with_recompute(plan, cells_of(plan), COSTS)
    inside = time_inside_backward(plan, cells_of(plan))
    assert inside == simulate(plan, Costs(1, 3)).makespan_ns
    assert time_of(with_r_on_the_last_stage(result)) == inside - (num_devices - 1)
    # Without the last stage's, which has no R, inside B either.
    upper = [cell for cell in cells_of(plan) if cell.stage < num_devices - 1]
    assert time_of(result) <= time_inside_backward(plan, upper) - (num_devices - 1)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), SIZES)
def test_recompute_is_free_where_the_last_stage_is_slower(
    num_devices: int, num_microbatches: int
) -> None:
    # Forward and backward of the last stage take as much more as an R elsewhere.
    others = num_devices - 1
    costs = Costs([10] * others + [13], [20] * others + [26], recompute_ns=9)
    plan = schedules.one_f_one_b(num_devices, num_microbatches)
    result = with_recompute(plan, cells_of(plan), costs)
    assert result.num_actions == plan.num_actions + others * num_microbatches
    assert simulate(result, costs).makespan_ns == simulate(plan, costs).makespan_ns


def test_two_stages_in_memory_are_as_fast_as_all() -> None:
    plan = schedules.one_f_one_b(8, 16)
    fastest = time_of(with_recompute(plan, cells_of(plan), COSTS))
    memory = Memory(1)
    for cap_bytes, longer in ((1, 1), (2, 0), (8, 0)):
        result = with_recompute(plan, cells_of(plan), COSTS, memory, cap_bytes)
        check_memory(result, memory, cap_bytes)
        assert time_of(result) == fastest + longer


def at_once(plan: Plan) -> set[Action]:
    """Cells whose backward follows their forward."""
    return {
        Action(Kind.R, first.stage, first.microbatch)
        for row in plan.rows
        for first, second in pairwise(row)
        if first.kind is Kind.F and second.kind in (Kind.B, Kind.I)
        if (first.stage, first.microbatch) == (second.stage, second.microbatch)
    }


TRAINING = [name for name in schedules.by_name if name not in ("forward_only", "seq1f1b")]


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("counts", [(2, 4), (4, 8)])
@pytest.mark.parametrize("cap_bytes", [2.0, float("inf")])
def test_every_schedule_runs_with_all_cells_recomputed(
    name: str, counts: tuple[int, int], cap_bytes: float
) -> None:
    plan = schedules.by_name[name](*counts)
    cells, memory = cells_of(plan), Memory(1, boundary_bytes=0.125)
    result = with_recompute(plan, cells, COSTS, memory, cap_bytes)
    check(result)
    check_lowered(lower(result))
    recomputed = {action for row in result.rows for action in row if action.kind is Kind.R}
    assert recomputed == set(cells) - at_once(plan)
    assert result.forward_only() == plan.forward_only()
    assert weight_versions(result) == weight_versions(plan)
    timeline = simulate(result, COSTS)
    assert time_of(plan) <= timeline.makespan_ns <= time_of(plan) * 4 / 3
    assert critical_path(result, COSTS)[-1].span.end_ns == timeline.makespan_ns
    for device, bubble in enumerate(bubbles(result, COSTS)):
        idle_ns = bubble.before_first_ns + bubble.after_last_ns + bubble.compute_ns
        assert idle_ns == timeline.makespan_ns - timeline.busy_ns(device)
