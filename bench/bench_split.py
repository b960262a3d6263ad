"""Claim: I and W together cost little more than the backward that they are the parts of.

All stages on one worker, so that only the work counts and not when it is done. Baseline: the same
plan with whole backwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.models.gpt import gpt
from pykern.plan import Action, Kind, Plan

from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge

_NUM_STAGES = 4
_ROWS = 2


@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_split(
    width: int, benchmark: BenchmarkFixture, smoke: bool, report: Callable[[list[Record]], None]
) -> None:
    """A step of four GPT blocks, one a stage, with backward whole and in parts."""
    num_microbatches, context = (2, 8) if smoke else (4, 128)
    torch.manual_seed(0)
    # From hidden states to hidden states, so that all stages are alike.
    whole = gpt(vocab=8, layers=_NUM_STAGES, width=width, heads=8, context=context)
    model = nn.Sequential(*list(whole)[1:-1])
    batch = torch.randn(2, _ROWS * num_microbatches, context, width)
    plan = schedules.interleaved(1, num_microbatches, num_chunks=_NUM_STAGES)
    contenders = [
        _contender("B", model, batch, plan),
        _contender("I and W", model, batch, _in_parts(plan)),
    ]
    assert_same_answer(contenders, tolerance=0.0)
    samples = interleave(benchmark, contenders, rounds=1 if smoke else 30)
    if smoke:
        return
    num_backwards = _NUM_STAGES * num_microbatches

    def figures(median_ms: float, whole_ms: float) -> dict[str, float]:
        return {"ms more per backward": (median_ms - whole_ms) / num_backwards}

    case = f"{_NUM_STAGES} GPT blocks of width {width}, {_ROWS} rows of {context} a microbatch"
    report(judge("split", case, samples, "B", figures))


def _in_parts(plan: Plan) -> Plan:
    """Every B as an I with its W right behind."""
    parts = {Kind.F: (Kind.F,), Kind.B: (Kind.I, Kind.W)}
    rows = [
        [Action(kind, a.stage, a.microbatch) for a in row for kind in parts[a.kind]]
        for row in plan.rows
    ]
    return Plan(plan.placement, plan.num_microbatches, rows)


def _contender(name: str, model: nn.Sequential, batch: Tensor, plan: Plan) -> Contender:
    chain = copy.deepcopy(model)
    pipe = pykern.Pipeline(
        chain, devices="cpu:1", schedule=plan, loss_fn=F.mse_loss, balance="layers"
    )
    x, y = batch
    return in_this_process(name, chain, 1, lambda: pipe.step(x, target=y))
