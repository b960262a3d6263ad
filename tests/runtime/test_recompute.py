"""Recompute: with R, whatever the plan and the layers, every bit is as without it."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu

from pykern import schedules
from pykern.plan import Plan
from tests.runtime.hard_layers import LAYERS, Written, linear, tied
from tests.runtime.models import CASES, Case
from tests.runtime.plans import recomputed, split_backward, two_replicas
from tests.runtime.recomputing import check_steps
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

# Updates within a step, and slices, need an executor that is not there yet.
NOT_YET = {"pipedream", "pipedream_2bw", "seq1f1b"}
PLANS: dict[str, Callable[[int, int], Plan]] = {
    name: make for name, make in schedules.by_name.items() if name not in NOT_YET | {"forward_only"}
}
PLANS["split replicas"] = lambda p, m: split_backward(two_replicas(p, m))
MODELS = sorted(CASES)


def pairs() -> list[Any]:
    """Every plan, each with two models, so that all models and levels take part."""
    found = []
    for number, name in enumerate(sorted(PLANS)):
        for turn, level in enumerate(("layer", "stage")):
            model = MODELS[(number + turn * 3) % len(MODELS)]
            late = (number + turn) % 2 == 0
            found.append(pytest.param(name, model, level, late, id=f"{name}-{model}-{level}"))
    found += [
        pytest.param("zb_h1", model, level, False, id=f"zb_h1-{model}-{level}-early")
        for model in MODELS
        for level in ("layer", "stage")
    ]
    return found


@pytest.mark.parametrize(("name", "model", "level", "late"), pairs())
def test_every_bit_equals_the_plain_model(name: str, model: str, level: Any, late: bool) -> None:
    plan = PLANS[name](4, 8 if name == "dualpipe_v" else 4)
    num_replicas = plan.placement.num_replicas
    # Running statistics are refused where there are replicas.
    case = CASES["structured" if num_replicas > 1 and model == "cnn" else model](11)
    # The second step has empty microbatches.
    check_steps(case, recomputed(plan, late=late), level, [11, 3])


@pytest.mark.parametrize("level", ["layer", "stage"])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_that_are_hard_to_repeat(name: str, level: Any) -> None:
    layers = [*LAYERS[name](), linear(), nn.Dropout(0.2), linear()]
    case = Case(nn.Sequential(*layers), torch.randn(9, 6), torch.randn(9, 6), F.mse_loss)
    plan = recomputed(split_backward(schedules.one_f_one_b(2, 4)), late=name in ("tied", "modes"))
    check_steps(case, plan, level, [9, 9], balance=[len(layers) - 3, 3])


@pytest.mark.parametrize("level", ["layer", "stage"])
def test_a_layer_may_write_into_the_batch(level: Any) -> None:
    # The rounding of a matrix product depends on where its factors lie: rows of 64 bytes.
    layers = nn.Sequential(Written(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    case = Case(layers, torch.randn(8, 16), torch.randn(8, 16), F.mse_loss)
    check_steps(case, recomputed(schedules.one_f_one_b(1, 4)), level, [8, 8])


CALLERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "autocast without a cache": lambda: torch.autocast(
        "cpu", dtype=torch.bfloat16, cache_enabled=False
    ),
    "hooks": save_on_cpu,
    "no hooks": lambda: disable_saved_tensors_hooks("there are not any here"),
}


@pytest.mark.parametrize("caller", CALLERS)
def test_modes_of_the_caller(caller: str) -> None:
    layers = nn.Sequential(*tied(), *tied())
    case = Case(layers, torch.randn(9, 6), torch.randn(9, 6), F.mse_loss)
    plan = recomputed(schedules.zb_h1(2, 4))
    with CALLERS[caller]():
        check_steps(case, plan, "layer", [9, 9], balance=[5, 5])


class Copied(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.is_inference()
        return x.clone()


@pytest.mark.parametrize("level", ["layer", "stage"])
def test_a_batch_may_come_from_inference_mode(level: Any) -> None:
    with torch.inference_mode():
        x = torch.randn(8, 6)
    layers = nn.Sequential(nn.Identity(), Copied(), linear(), nn.Tanh(), linear())
    plain = copy.deepcopy(layers)
    case = Case(layers, x, torch.randn(8, 6), F.mse_loss)
    plan = recomputed(schedules.one_f_one_b(2, 4))
    with case.pipeline(plan, recompute=level, balance=[3, 2]) as pipe:
        expected = plain_step(plain, x, case.target, F.mse_loss, 4)
        assert torch.equal(pipe.step(x, target=case.target), expected)
        assert_same_state(pipe, plain)
