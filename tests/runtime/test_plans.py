"""Pipelines with plans that hold more than F and B."""

import copy
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern
from pykern import schedules
from pykern.plan import Action, Kind, Placement, Plan, check
from tests.runtime.plans import split_backward, split_some
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step
from tests.support.threads import workers

LINEAR = [nn.Linear(2, 2), nn.Linear(2, 2)]


@pytest.mark.parametrize("split", [split_backward, split_some])
def test_predictions_use_what_each_kind_took(split: Callable[[Plan], Plan]) -> None:
    plan = split(schedules.gpipe(2, 3))
    with pykern.Pipeline(LINEAR, devices="cpu:2", schedule=plan, loss_fn=F.mse_loss) as pipe:
        pipe.step(torch.ones(3, 2), target=torch.ones(3, 2))
        measured: dict[tuple[Kind, int], list[float]] = {}
        for row in pipe.timeline().rows:
            for span in row:
                key = span.action.kind, span.action.stage
                measured.setdefault(key, []).append(span.end_ns - span.start_ns)
        predicted = pipe.prediction().rows
    assert [[span.action for span in row] for row in predicted] == [list(r) for r in plan.rows]
    for row in predicted:
        for span in row:
            mean = fmean(measured[span.action.kind, span.action.stage])
            assert span.end_ns - span.start_ns == pytest.approx(mean)


def test_actions_that_share_a_slot_run_one_after_the_other() -> None:
    plan = schedules.one_f_one_b(2, 4)
    pairs = [
        [
            position
            for position, (action, following) in enumerate(pairwise(row))
            if (action.kind, following.kind) == (Kind.F, Kind.B)
            and action.microbatch != following.microbatch
        ]
        for row in plan.rows
    ]
    assert any(pairs)
    plan = Plan(plan.placement, 4, plan.rows, overlaps=pairs)
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plain = copy.deepcopy(layers)
    x, y = torch.randn(4, 2), torch.randn(4, 2)
    with pykern.Pipeline(layers, devices="cpu:2", schedule=plan, loss_fn=F.mse_loss) as pipe:
        assert torch.equal(pipe.step(x, target=y), plain_step(plain, x, y, F.mse_loss, 4))
        assert_same_state(pipe, plain)
        for row in pipe.timeline().rows:
            assert all(span.end_ns <= following.start_ns for span, following in pairwise(row))


def with_updates() -> Plan:
    rows = [["F", "B", "U"], ["F", "B", "U"]]
    actions = [[Action.parse(f"{s}{kind}0") for kind in row] for s, row in enumerate(rows)]
    return Plan(Placement.linear(2), 1, actions)


def with_slices() -> Plan:
    rows = [[Action(Kind.F, s, 0, part) for part in range(2)] for s in range(2)]
    return Plan(Placement.linear(2), 1, rows, 2)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (with_updates(), "the plan must not update weights within a step, got U actions"),
        (
            with_slices(),
            "the plan must have whole microbatches, got 2 slices of each, which stages do not run",
        ),
    ],
)
def test_a_plan_for_other_executors_is_refused_before_a_thread_starts(
    plan: Plan, message: str
) -> None:
    check(plan)
    before = workers()
    with pytest.raises(ValueError, match=message):
        pykern.Pipeline(LINEAR, devices="cpu:2", schedule=plan)
    assert workers() <= before
