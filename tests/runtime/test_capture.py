"""Graph mode on the fake driver: replays give the bits of the plain model, or say why they cannot."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.models import CASES, Case
from tests.runtime.reference import assert_same_state, plain_step
from tests.runtime.test_streams import gpus  # noqa: F401 - a fixture

ROWS = 12


def captured(case: Case, plan: Plan, capture: Any = True, devices: Any = None) -> pykern.Pipeline:
    names = [f"cuda:{device}" for device in range(plan.num_devices)]
    return pykern.Pipeline(
        case.layers,
        devices=devices or names,
        schedule=plan,
        loss_fn=case.loss_fn,
        capture=capture,
    )


def steps(pipe: pykern.Pipeline, plain: nn.Sequential, case: Case, count: int) -> None:
    """Steps of both, with an update after each; equal to the bit after each."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (pipe, plain)]
    for number in range(count):
        x = case.inputs[:ROWS].roll(number, 0)
        y = case.target[:ROWS].roll(number, 0)
        expected = plain_step(
            plain, x, y, case.loss_fn, pipe.plan.num_microbatches, pipe.partition.stages
        )
        assert torch.equal(pipe.step(x, target=y), expected)
        assert_same_state(pipe, plain)
        # The second adds to the gradients of the first.
        if number % 3 != 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=number % 2 == 0)


@pytest.mark.parametrize("model", sorted(CASES.keys() - {"dropout"}))
@pytest.mark.parametrize("name", ["one_f_one_b", "interleaved", "zb_h1", "hanayo"])
def test_replays_have_the_bits_of_the_plain_model(
    gpus: FakeCuda,  # noqa: F811
    model: str,
    name: str,
) -> None:
    case = CASES[model](ROWS)
    plain = copy.deepcopy(case.layers)
    with captured(case, schedules.by_name[name](2, 4)) as pipe:
        steps(pipe, plain, case, 6)
        assert gpus.calls("cuGraphLaunch") > 0
