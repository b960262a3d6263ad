"""The promise: loss, gradients and buffers equal the plain model's, bit for bit, on every
schedule."""

import copy
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.runtime.models import CASES, Case
from tests.runtime.plans import split_backward, split_some, two_replicas
from tests.runtime.reference import assert_same_state, plain_step

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("gpipe", {}),
    ("one_f_one_b", {}),
    ("interleaved", {"num_chunks": 2}),
    ("hanayo", {"waves": 1}),
]


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("num_microbatches", [1, 2, 5, 8])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
@pytest.mark.parametrize(("schedule", "options"), SCHEDULES, ids=[name for name, _ in SCHEDULES])
def test_every_bit_equals_the_plain_model(
    schedule: str, options: dict[str, Any], num_devices: int, num_microbatches: int, model: str
) -> None:
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    with pykern.Pipeline(
        case.layers,
        devices=f"cpu:{num_devices}",
        schedule=schedule,
        microbatches=num_microbatches,
        loss_fn=case.loss_fn,
        balance="layers",
        **options,
    ) as pipe:
        # The second step adds to the gradients of the first, with another batch size.
        for rows in (11, 3):
            x, y = case.inputs[:rows], case.target[:rows]
            expected = plain_step(
                plain, x, y, case.loss_fn, num_microbatches, pipe.partition.stages
            )
            loss = pipe.step(x, target=y)
            assert torch.equal(loss, expected)
            assert_same_state(pipe, plain)


PLANS: dict[str, Callable[[int, int], Plan]] = {
    "split": lambda p, m: split_backward(schedules.one_f_one_b(p, m), delay=2),
    "split late": lambda p, m: split_backward(schedules.interleaved(p, m, num_chunks=2), delay=m),
    "split some": lambda p, m: split_some(schedules.hanayo(p, m, waves=1)),
    "replicas": two_replicas,
    "split replicas": lambda p, m: split_backward(two_replicas(p, m)),
}


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(1, 2), (2, 5), (3, 1), (4, 8)])
@pytest.mark.parametrize("form", PLANS)
def test_every_form_of_backward_gives_the_same_bits(
    form: str, num_devices: int, num_microbatches: int, model: str
) -> None:
    case = CASES[model](11)
    plain = copy.deepcopy(case.layers)
    plan = PLANS[form](num_devices, num_microbatches)
    num_replicas = plan.placement.num_replicas
    if num_replicas > 1 and model == "cnn":
        with pytest.raises(ValueError, match=r"1 \(BatchNorm2d\) has running statistics"):
            pipeline(case, plan)
        return
    with pipeline(case, plan) as pipe:
        # The second step adds to the gradients of the first, and has rows for one replica only.
        for rows in (11, 1):
            x, y = case.inputs[:rows], case.target[:rows]
            stages = pipe.partition.stages
            expected = plain_step(
                plain, x, y, case.loss_fn, num_microbatches, stages, num_replicas=num_replicas
            )
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)


def pipeline(case: Case, plan: Plan) -> pykern.Pipeline:
    return pykern.Pipeline(
        case.layers,
        devices=f"cpu:{plan.num_devices}",
        schedule=plan,
        loss_fn=case.loss_fn,
        balance="layers",
    )


@pytest.mark.parametrize("model", CASES)
@pytest.mark.parametrize("form", ["hanayo", "split late", "split replicas"])
def test_delays_change_nothing(form: str, model: str) -> None:
    """Actions that take a random time meet in another order in every step."""
    case = CASES[model](11)
    plan = PLANS[form](4, 5) if form in PLANS else schedules.by_name[form](4, 5)
    num_replicas = plan.placement.num_replicas
    if num_replicas > 1 and model == "cnn":
        return
    plain = copy.deepcopy(case.layers)
    delays = random.Random(7)
    for layer in case.layers:
        layer.register_forward_pre_hook(lambda *_: time.sleep(delays.uniform(0, 0.001)))
    with pipeline(case, plan) as pipe:
        for _ in range(4):
            stages = pipe.partition.stages
            expected = plain_step(
                plain, case.inputs, case.target, case.loss_fn, 5, stages, num_replicas=num_replicas
            )
            assert torch.equal(pipe.step(case.inputs, target=case.target), expected)
            assert_same_state(pipe, plain)


class Twice(nn.Module):
    """Returns the same tensor in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y


class Mix(nn.Module):
    """Uses the first of two more than once, and works in place on it if told to."""

    def __init__(self, *, inplace: bool) -> None:
        super().__init__()
        self.inplace = inplace

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        x = F.relu(pair[0], inplace=True) if self.inplace else pair[0]
        return x * 1.3 + pair[1].tanh() * x + (x * pair[1]).sin()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_tensor_that_is_handed_over_twice_stays_one(inplace: bool) -> None:
    layers = nn.Sequential(Twice(), Mix(inplace=inplace), Twice(), Mix(inplace=inplace))
    plain = copy.deepcopy(layers)
    x, y = torch.randn(9, 8), torch.randn(9, 8)
    with pykern.Pipeline(
        layers, devices="cpu:4", microbatches=4, loss_fn=F.mse_loss, balance="layers"
    ) as pipe:
        for _ in range(3):
            expected = plain_step(plain, x, y, F.mse_loss, 4)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)


def test_three_waves() -> None:
    case = CASES["mlp"](7)
    layers = torch.nn.Sequential(*case.layers, *copy.deepcopy(case.layers))
    plain = copy.deepcopy(layers)
    with pykern.Pipeline(
        layers, devices="cpu:3", schedule="hanayo", waves=3, microbatches=4, loss_fn=case.loss_fn
    ) as pipe:
        expected = plain_step(plain, case.inputs, case.target, case.loss_fn, 4)
        assert torch.equal(pipe.step(case.inputs, target=case.target), expected)
        assert_same_state(pipe, plain)


def test_training_stays_equal_over_many_optimizer_steps() -> None:
    case = CASES["gpt"](10)
    plain = copy.deepcopy(case.layers)
    with pykern.Pipeline(
        case.layers, devices="cpu:3", schedule="one_f_one_b", microbatches=4, loss_fn=case.loss_fn
    ) as pipe:
        ours = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        losses = []
        for _ in range(20):
            ours.zero_grad()
            theirs.zero_grad()
            expected = plain_step(plain, case.inputs, case.target, case.loss_fn, 4)
            losses.append(pipe.step(case.inputs, target=case.target))
            assert torch.equal(losses[-1], expected)
            ours.step()
            theirs.step()
        assert losses[-1] < losses[0] / 2
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name))


def test_the_step_is_the_mean_over_the_full_batch() -> None:
    """Uneven microbatches count by their rows: 7 rows in 4 parts equal one batch of 7 rows."""
    case = CASES["mlp"](7)
    double = case.layers.double()
    plain = copy.deepcopy(double)
    x, y = case.inputs.double(), case.target.double()
    with pykern.Pipeline(double, devices="cpu:2", microbatches=4, loss_fn=case.loss_fn) as pipe:
        loss = pipe.step(x, target=y)
    whole = case.loss_fn(plain(x), y)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-14, atol=0)
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(
            parameter.grad, plain.get_parameter(name).grad, rtol=1e-12, atol=1e-15
        )


def test_sum_reduction_adds_microbatches() -> None:
    case = CASES["mlp"](7)
    plain = copy.deepcopy(case.layers)

    def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(output, target, reduction="sum")

    with pykern.Pipeline(
        case.layers, devices="cpu:2", microbatches=3, loss_fn=total, reduction="sum"
    ) as pipe:
        loss = pipe.step(case.inputs, target=case.target)
    for x, y in zip(case.inputs.split([3, 2, 2]), case.target.split([3, 2, 2]), strict=True):
        total(plain(x), y).backward()
    torch.testing.assert_close(loss, total(plain(case.inputs), case.target).detach())
    assert_same_state(pipe, plain)


@pytest.mark.parametrize("model", CASES)
def test_forward_only_equals_the_plain_model(model: str) -> None:
    case = CASES[model](9)
    plain = copy.deepcopy(case.layers).eval()
    with pykern.Pipeline(case.layers, devices="cpu:4", schedule="hanayo", microbatches=4) as pipe:
        pipe.eval()
        for rows in (9, 2, 5):
            output = pipe(case.inputs[:rows])
            with torch.no_grad():
                parts = case.inputs[:rows].tensor_split(4)
                expected = torch.cat([plain(part) for part in parts if len(part)])
            assert torch.equal(output, expected)
            assert not output.requires_grad
