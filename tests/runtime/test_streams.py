"""The CUDA path on the fake driver: same bits as the plain model, and no rule of CUDA is broken."""

import copy
from typing import Any

import pytest
import torch

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.models import CASES, Case
from tests.runtime.reference import assert_same_state, plain_step


def pipeline(case: Case, plan: Plan, devices: Any = None) -> pykern.Pipeline:
    names = [f"cuda:{device}" for device in range(plan.num_devices)]
    return pykern.Pipeline(
        case.layers, devices=devices or names, schedule=plan, loss_fn=case.loss_fn
    )


@pytest.mark.parametrize("model", CASES)
def test_every_bit_equals_the_plain_model(gpus: FakeCuda, model: str) -> None:
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    plan = schedules.one_f_one_b(3, 4)
    with pipeline(case, plan) as pipe:
        for rows in (11, 3):
            x, y = case.inputs[:rows], case.target[:rows]
            expected = plain_step(plain, x, y, case.loss_fn, 4, pipe.partition.stages)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)


@pytest.mark.parametrize(
    "plan",
    [
        schedules.gpipe(2, 4),
        schedules.interleaved(2, 4, 2),
        schedules.hanayo(2, 4, 1),
        schedules.zb_h1(2, 4),
    ],
    ids=["gpipe", "interleaved", "hanayo", "zb_h1"],
)
def test_slots_are_used_again_in_order_whatever_the_schedule(gpus: FakeCuda, plan: Plan) -> None:
    case = CASES["mlp"](11)
    plain = copy.deepcopy(case.layers)
    with pipeline(case, plan) as pipe:
        for _ in range(2):
            expected = plain_step(
                plain, case.inputs, case.target, case.loss_fn, 4, pipe.partition.stages
            )
            assert torch.equal(pipe.step(case.inputs, target=case.target), expected)
            assert_same_state(pipe, plain)
