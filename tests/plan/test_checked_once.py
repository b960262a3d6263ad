"""A plan that has passed its check is not checked again; a plan that has failed is."""

import pickle
import time

import pytest

from pykern.plan import Costs, Placement, Plan, PlanError, by_slots, check, simulate
from tests.support.plans import plan_of


def check_ns(plan: Plan) -> int:
    start = time.perf_counter_ns()
    check(plan)
    return time.perf_counter_ns() - start


def test_a_plan_that_has_passed_is_not_checked_again() -> None:
    made = by_slots(Placement.linear(8), 8_000, group=1, group_offset=2)
    plan = Plan(made.placement, made.num_microbatches, made.rows)
    first = check_ns(plan)
    assert min(check_ns(plan) for _ in range(5)) < first / 20
    # The functions that make plans have checked theirs.
    assert min(check_ns(made) for _ in range(5)) < first / 20
    assert pickle.loads(pickle.dumps(plan)) == plan == made


def test_a_simulation_is_a_check() -> None:
    made = by_slots(Placement.linear(8), 8_000, group=1, group_offset=2)
    plan, other = (Plan(made.placement, made.num_microbatches, made.rows) for _ in range(2))
    assert simulate(plan, Costs(1, 2)) == simulate(made, Costs(1, 2))
    assert min(check_ns(plan) for _ in range(5)) < check_ns(other) / 20


def test_a_plan_that_fails_fails_again() -> None:
    plan = plan_of(Placement.linear(2), 1, "0F0 0B0", "1B0 1F0")
    for _ in range(2):
        with pytest.raises(PlanError, match="P006"):
            check(plan)
        with pytest.raises(PlanError, match="P006"):
            simulate(plan, Costs(1, 2))
