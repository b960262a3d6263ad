"""Levels that fit a budget."""

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykern import schedules
from pykern.budget.fit import Fitted, fit
from pykern.budget.fit_memory import most_held
from pykern.budget.level_costs import (
    LevelCost,
    Rebuilt,
    StageCosts,
    StageLevel,
    costs_of,
    memory_of,
)
from pykern.plan import Action, Kind, Plan, check, peak_bytes, simulate, with_recompute

# Numbers of reference tables for a Llama layer, in units of its input; times in units of a forward.
KEPT = {
    "none": LevelCost(1.0, 2.0, 34.0, 17.0),
    "ops": LevelCost(1.0, 2.03, 23.0, 17.0),
    "ops+stash": LevelCost(1.01, 2.05, 16.0, 17.0),
}
REBUILT = {"layer": Rebuilt(0.25, 6.0, 14.0, 0.75), "stage": Rebuilt(1.0, 2.0, 34.0)}
STAGE = StageCosts(KEPT, REBUILT, workspace_bytes=1.0)


def uniform(plan: Plan, stages: list[StageCosts], cap: float) -> list[float]:
    """Makespans of levels that are the same everywhere and fit."""
    found = []
    for kept in KEPT:
        for rebuilt in (None, *REBUILT):
            every = frozenset(range(plan.num_microbatches))
            levels = [StageLevel(kept, rebuilt, every)] * plan.num_stages
            cells = [
                Action(Kind.R, s, m)
                for s in range(plan.num_stages)
                for m in range(plan.num_microbatches)
            ]
            costs, memory = (
                costs_of(stages, levels, plan.num_microbatches),
                memory_of(stages, levels),
            )
            with_r = with_recompute(plan, cells, costs, memory, cap) if rebuilt else plan
            if max(peak_bytes(with_r, memory)) <= cap:
                found.append(simulate(with_r, costs).makespan_ns)
    return found


def require_right(fitted: Fitted, stages: list[StageCosts]) -> None:
    """Its numbers are those of the planner."""
    check(fitted.plan)
    costs, memory = (
        costs_of(stages, fitted.levels, fitted.plan.num_microbatches),
        memory_of(stages, fitted.levels),
    )
    assert fitted.timeline == simulate(fitted.plan, costs)
    held = peak_bytes(fitted.plan, memory)
    for device, bytes_ in enumerate(held):
        assert bytes_ + 1.0 == pytest.approx(fitted.peak_bytes[device])
        assert fitted.peak_bytes[device] <= fitted.budget_bytes[device]


@pytest.mark.parametrize("num_devices", [4, 8])
@pytest.mark.parametrize("times", [1, 2, 4])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_budgets_hold_and_no_uniform_level_is_faster(
    num_devices: int, times: int, share: float
) -> None:
    plan = schedules.one_f_one_b(num_devices, num_devices * times)
    stages = [STAGE] * num_devices
    budget = share * (34.0 * num_devices + 1.0)
    fitted = fit(plan, stages, [budget] * num_devices)
    require_right(fitted, stages)
    others = uniform(plan, stages, budget - 1.0)
    assert others
    assert fitted.timeline.makespan_ns <= min(others)


def test_with_room_nothing_is_recomputed() -> None:
    plan = schedules.one_f_one_b(4, 8)
    fitted = fit(plan, [STAGE] * 4, [1000.0] * 4)
    assert fitted.plan == plan
    assert fitted.by_microbatch() == [["none"] * 8] * 4


def test_stages_without_kernels_recompute_only_what_does_not_fit() -> None:
    """Where there are three in flight too many, cool-down ones are free."""
    plan = schedules.one_f_one_b(4, 4)
    stages = [StageCosts({"none": KEPT["none"]}, REBUILT)] * 4
    fitted = fit(plan, stages, [3 * 34.0] * 4)
    # Four are in flight on the first device; their backwards have a forward's time between them.
    assert sum(level != "none" for level in fitted.by_microbatch()[0]) in {1, 2}
    assert [set(levels) for levels in fitted.by_microbatch()[1:]] == [{"none"}] * 3
    assert (
        fitted.timeline.makespan_ns
        == simulate(plan, costs_of(stages, fitted.levels, fitted.plan.num_microbatches)).makespan_ns
    )


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb_h1", "hanayo", "chimera"])
def test_other_schedules_fit(schedule: str) -> None:
    plan = schedules.by_name[schedule](4, 8)
    stages = [STAGE] * plan.num_stages
    whole = max(peak_bytes(plan, memory_of(stages, [StageLevel("none")] * plan.num_stages)))
    fitted = fit(plan, stages, [0.6 * whole] * 4)
    require_right(fitted, stages)


@settings(max_examples=30)
@given(
    num_devices=st.integers(1, 5),
    num_microbatches=st.integers(1, 8),
    activations=st.lists(st.floats(1, 50), min_size=5, max_size=5),
    shares=st.lists(st.floats(0.2, 1.2), min_size=5, max_size=5),
)
def test_any_budget_holds_or_is_refused(
    num_devices: int, num_microbatches: int, activations: list[float], shares: list[float]
) -> None:
    plan = schedules.gpipe(num_devices, num_microbatches)
    stages = [
        StageCosts({"none": LevelCost(1.0, 2.0, a, a)}, {"stage": Rebuilt(1.0, a / 10, a)}, 1.0)
        for a in activations[:num_devices]
    ]
    budgets = [
        share * (stage.kept["none"].activation_bytes * num_microbatches + 1.0)
        for share, stage in zip(shares, stages, strict=False)
    ]
    try:
        fitted = fit(plan, stages, budgets)
    except ValueError as error:
        assert "num_bytes must be at least" in str(error)  # noqa: PT017
        # With everything recomputed, one whole microbatch has to fit beside the others' inputs.
        assert any(
            budget < 1.0 + a * (1 + (num_microbatches - 1) / 10)
            for budget, a in zip(budgets, activations, strict=False)
        )
    else:
        require_right(fitted, stages)


def test_what_does_not_fit_is_refused_by_value() -> None:
    plan = schedules.one_f_one_b(2, 4)
    with pytest.raises(ValueError, match="for the activations of device 0 at any level, got 10"):
        fit(plan, [STAGE] * 2, [10.0, 100.0])
    with pytest.raises(ValueError, match="costs must hold one entry for each of 2 stages, got 1"):
        fit(plan, [STAGE], [10.0, 100.0])
    with pytest.raises(
        ValueError, match="budget_bytes must hold one number for each of 2 devices, got 1"
    ):
        fit(plan, [STAGE] * 2, [10.0])
    with pytest.raises(
        ValueError,
        match=r"plan must have backwards and no R before levels "
        r"are chosen, got one without backwards or with R. "
        r"Give a plan of a training schedule, before "
        r"recompute\(\) adds R",
    ):
        fit(plan.forward_only(), [STAGE] * 2, [10.0] * 2)


class Looked:
    """A plan that counts how often its rows are asked for, which makes objects of all actions."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.looks = plan, 0

    @property
    def rows(self) -> Any:
        self.looks += 1
        return self.plan.rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)


def test_the_rows_of_a_plan_are_asked_for_a_few_times() -> None:
    """They were asked for once in each round of the devices, which took the square of the plan."""
    plan = schedules.one_f_one_b(3, 40)
    levels = [StageLevel("ops")] * 3
    looked = cast(Any, Looked(plan))
    assert most_held(looked, [STAGE] * 3, levels) == most_held(plan, [STAGE] * 3, levels)
    assert looked.looks <= 4


def test_the_text_says_what_was_chosen() -> None:
    fitted = fit(schedules.one_f_one_b(2, 4), [STAGE] * 2, [40.0, 100.0])
    lines = str(fitted).splitlines()
    assert lines[0].startswith("stage 0 on device 0: ")
    assert lines[2] == f"device 0: {fitted.peak_bytes[0]:,.0f} of 40 bytes of activations"
    assert lines[-1] == "step: 0.000 ms predicted"
