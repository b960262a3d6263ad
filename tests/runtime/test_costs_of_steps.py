"""The costs of a step: what ran has a time, what did not run is not known, and never free."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pykern import Pipeline, search
from pykern.plan import (
    Action,
    Costs,
    Kind,
    Timeline,
    load_plan_and_costs,
    save_plan,
    simulate,
    with_recompute,
)
from pykern.schedules import gpipe, one_f_one_b, zb_h1

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def costs_of(schedule: str, **options: Any) -> Costs:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with Pipeline(
        model, devices="cpu:2", microbatches=4, schedule=schedule, loss_fn=nn.MSELoss(), **options
    ) as pipe:
        pipe.step(X, target=Y)
        return pipe.costs()


def is_known(times: float | list[float]) -> list[bool]:
    assert isinstance(times, list)
    return [not math.isnan(time) for time in times]


def test_halves_that_never_ran_are_not_free() -> None:
    costs = costs_of("one_f_one_b")
    assert is_known(costs.forward_ns) == is_known(costs.backward_ns) == [True, True]
    for times in (costs.input_ns, costs.weight_ns, costs.recompute_ns, costs.update_ns):
        assert is_known(times) == [False, False]
    assert simulate(gpipe(2, 8), costs).makespan_ns > 0
    with pytest.raises(ValueError, match=r"input_ns of stage . must be known .* I, got nan.*zb_h1"):
        simulate(zb_h1(2, 8), costs)
    plan = one_f_one_b(2, 8)
    cells = [Action(Kind.R, stage, 0) for stage in range(2)]
    with pytest.raises(ValueError, match=r"recompute_ns of stage . must be known .*with recompute"):
        with_recompute(plan, cells, costs)


def test_a_whole_backward_takes_as_long_as_its_measured_halves() -> None:
    costs = costs_of("zb_h1")
    halves = zip(costs.input_ns, costs.weight_ns, strict=True)  # type: ignore[arg-type]
    assert costs.backward_ns == [inputs + weights for inputs, weights in halves]
    assert simulate(one_f_one_b(2, 8), costs).makespan_ns > 0


def test_what_is_not_known_about_backwards_after_a_forward() -> None:
    with Pipeline(
        nn.Sequential(nn.Linear(4, 4)), devices="cpu:1", microbatches=2, loss_fn=nn.MSELoss()
    ) as pipe:
        with torch.no_grad():
            pipe(X)
        costs = pipe.costs()
        assert pipe.prediction().makespan_ns > 0
    with pytest.raises(ValueError, match="backward_ns of stage 0 must be known"):
        simulate(one_f_one_b(1, 2), costs)
    with pytest.raises(ValueError, match="backward_ns of stage 0 must be known"):
        search.auto(1, 2, costs=lambda _: costs, max_chunks=1)


@pytest.mark.parametrize("num_microbatches", [8, 40])
def test_a_search_leaves_out_what_is_not_known(num_microbatches: int) -> None:
    measured = Costs([3.0, 4.0], [5.0, 4.0], 0.5, input_ns=[2.0, math.nan], weight_ns=math.nan)
    found = search.auto(2, num_microbatches, costs=lambda _: measured, max_chunks=1, budget_ms=20)
    assert not found.plan.has(Kind.I)
    assert not any("zb" in name or "gis" in name for name in (*found.seeds, *found.refused))
    assert found.makespan_ns == simulate(found.plan, measured).makespan_ns
    assert found.bound_ns <= found.makespan_ns <= min(found.seeds.values())
    assert "without split backwards" in str(found)


def test_what_is_not_known_survives_a_file_and_equals_itself(tmp_path: Path) -> None:
    costs = Costs([1.0, math.nan], 2.0, input_ns=math.nan, weight_ns=[math.nan, 1.0])
    assert costs == Costs([1.0, math.nan], 2.0, input_ns=math.nan, weight_ns=[math.nan, 1.0])
    assert costs != Costs([1.0, 0.0], 2.0, input_ns=math.nan, weight_ns=[math.nan, 1.0])
    save_plan(one_f_one_b(2, 2), tmp_path / "plan.json", costs=costs)
    assert "NaN" not in (tmp_path / "plan.json").read_text()
    assert load_plan_and_costs(tmp_path / "plan.json")[1] == costs


def test_a_prediction_of_a_step_with_replicas_knows_its_reductions() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Pipeline(model, devices="cpu:4", replicas=2, microbatches=4, loss_fn=nn.MSELoss()) as pipe:
        pipe.step(X, target=Y)
        assert is_known(pipe.costs().reduce_ns) == [True, True]
        assert isinstance(pipe.prediction(), Timeline)
    assert pipe.plan.has(Kind.REDUCE)
