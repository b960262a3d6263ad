"""Random plans on torch's runtime, overlapped pairs included: in float64 the plain model's bits."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern.plan import Plan
from tests import peers
from tests.interop.torch_peers import (
    Gradients,
    backward_order,
    gradients_of,
    loss_of,
    make_batch,
    make_model,
    stages_of,
    step,
)
from tests.plan.strategies import random_plan_for_torch


def plans_of(seed: int, count: int, num_devices: int) -> list[Plan]:
    """The same in every process."""
    rng = random.Random(seed)
    return [random_plan_for_torch(rng, num_devices) for _ in range(count)]


def in_double(num_stages: int, num_microbatches: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    batch, target = make_batch(num_microbatches)
    model = [stage.double() for stage in make_model(num_stages)]
    return model, batch.double(), target.double()


def train(rank: int, seed: int, count: int, num_devices: int) -> list[tuple[Gradients, Any]]:
    """Gradients and losses of a step by each plan."""
    found = []
    for plan in plans_of(seed, count, num_devices):
        model, batch, target = in_double(plan.num_stages, plan.num_microbatches)
        schedule = plan.to_torch(stages_of(rank, plan, model), loss_fn=loss_of)
        losses: list[Tensor] = []
        step(schedule, (batch, target), losses=losses, return_outputs=False)
        found.append((gradients_of(rank, plan, model), losses))
    return found


def plain(plan: Plan) -> tuple[Gradients, list[Tensor]]:
    """The model without a pipeline, with each stage's microbatches added in the plan's order."""
    count = plan.num_microbatches
    model, batch, target = in_double(plan.num_stages, count)
    layers = nn.Sequential(*model)
    parts: list[Gradients] = []
    losses = []
    for x, y in zip(batch.chunk(count), target.chunk(count), strict=True):
        layers.zero_grad()
        loss = loss_of(layers(x), y)
        (loss / count).backward()
        parts.append({n: p.grad for n, p in layers.named_parameters() if p.grad is not None})
        losses.append(loss.detach())
    total: Gradients = {}
    for stage in range(plan.num_stages):
        for microbatch in backward_order(plan, stage):
            for name, gradient in parts[microbatch].items():
                if name.startswith(f"{stage}."):
                    total[name] = total[name] + gradient if name in total else gradient
    return total, losses


def expect_plain(seed: int, count: int, num_devices: int, timeout_s: float = 50) -> None:
    arguments = seed, count, num_devices
    found = peers.run(num_devices, train, *arguments, timeout_s=timeout_s)
    for number, plan in enumerate(plans_of(*arguments)):
        wanted, losses = plain(plan)
        gradients = {n: g for result in found for n, g in result[number][0].items()}
        assert gradients.keys() == wanted.keys(), (seed, number)
        wrong = [name for name, value in wanted.items() if not torch.equal(gradients[name], value)]
        assert not wrong, (seed, number, str(plan), wrong)
        last = found[plan.placement.device_of(plan.num_stages - 1)][number][1]
        assert torch.equal(torch.stack(last), torch.stack(losses)), (seed, number)


def test_random_plans_train_as_the_plain_model_does() -> None:
    expect_plain(seed=3, count=25, num_devices=2)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("seed", range(5))
def test_many_random_plans_train_as_the_plain_model_does(seed: int, num_devices: int) -> None:
    expect_plain(seed, 200, num_devices, timeout_s=500)
