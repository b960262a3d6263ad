"""Optimizers that a hook of a parameter steps, early and in time."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from pykern import schedules
from tests.fake_cuda.fake import FakeCuda
from tests.support.comparison import assert_same_state
from tests.support.pipelines import planned
from tests.support.plain_step import plain_step

WIDTH = 4
NUM_MICROBATCHES = 4
EARLY = r"hooks must change a parameter with its last gradient in a step, got an earlier change"


def model(num_blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_blocks)]
    return nn.Sequential(*blocks)


def batch() -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 2 * NUM_MICROBATCHES, WIDTH)
    return x, y


def step_in_backward(layers: nn.Module, every: int = 1) -> Callable[[], None]:
    """Steps an optimizer in each `every`th call of a hook; returns what removes the hooks."""
    calls: Counter[Tensor] = Counter()
    optimizers: dict[Tensor, torch.optim.SGD] = {
        p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in layers.parameters()
    }

    def update(held: Tensor) -> None:
        calls[held] += 1
        if calls[held] % every == 0:
            optimizers[held].step()
            optimizers[held].zero_grad()

    handles = [held.register_post_accumulate_grad_hook(update) for held in optimizers]

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "zb_v", "chimera"])
@pytest.mark.parametrize("recompute", [None, "stage", "layer"])
def test_updates_under_microbatches_in_flight_are_refused(name: str, recompute: Any) -> None:
    layers, (x, y) = model(), batch()
    remove = step_in_backward(layers)
    with planned(layers, schedules.by_name[name](2, 4), recompute=recompute) as pipe:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=EARLY):
                pipe.step(x, target=y)
        remove()
        pipe.zero_grad()
        plain = copy.deepcopy(layers)
        loss = pipe.step(x, target=y)
        if name != "chimera":
            assert torch.equal(loss, plain_step(plain, x, y, F.mse_loss, NUM_MICROBATCHES))
            assert_same_state(pipe, plain)


@pytest.mark.parametrize(
    "name", ["gpipe", "one_f_one_b", "interleaved", "hanayo", "zb_h1", "zb_v", "chimera"]
)
@pytest.mark.parametrize("recompute", [None, "stage", "layer"])
def test_updates_with_the_last_gradient_are_those_of_the_plain_loop(
    name: str, recompute: Any
) -> None:
    layers = model()
    plain = copy.deepcopy(layers)
    plan = schedules.by_name[name](2, 4)
    num_replicas = plan.placement.num_replicas
    # The sum of the second replica comes in one call.
    calls = NUM_MICROBATCHES // num_replicas + num_replicas - 1
    step_in_backward(layers, calls)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with planned(layers, plan, recompute=recompute) as pipe:
        for _ in range(2):
            x, y = batch()
            found = pipe.step(x, target=y)
            assert torch.equal(
                found, plain_step(plain, x, y, F.mse_loss, 4, num_replicas=num_replicas)
            )
            optimizer.step()
            optimizer.zero_grad()
            assert_same_state(pipe, plain)


def test_a_stage_without_other_microbatches_may_be_updated_by_each() -> None:
    """The last stage under 1F1B runs as the plain loop does: F, B, F, B."""
    layers, (x, y) = model(), batch()
    plain = copy.deepcopy(layers)
    for of in (layers, plain):
        step_in_backward(of[2:])
    with planned(layers, schedules.one_f_one_b(2, 4)) as pipe:
        for _ in range(2):
            assert torch.equal(
                pipe.step(x, target=y), plain_step(plain, x, y, F.mse_loss, NUM_MICROBATCHES)
            )
            assert_same_state(pipe, plain)


@pytest.mark.parametrize("every", [NUM_MICROBATCHES, NUM_MICROBATCHES + 1])
def test_a_parameter_of_two_stages_is_complete_with_the_sum_of_the_other_stage(every: int) -> None:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    step_in_backward(first, every)
    # Its hook stays, and is not called.
    first.bias.requires_grad_(False)
    layers, (x, y) = nn.Sequential(first, nn.Tanh(), last), batch()
    plain = copy.deepcopy(layers)
    with planned(layers, schedules.one_f_one_b(2, 4)) as pipe:
        if every == NUM_MICROBATCHES:
            with pytest.raises(RuntimeError, match=EARLY):
                pipe.step(x, target=y)
            return
        pipe.step(x, target=y)
    plain_step(plain, x, y, F.mse_loss, NUM_MICROBATCHES)
    torch.optim.SGD(plain[:1].parameters(), lr=0.1).step()
    torch.testing.assert_close(first.weight, plain.get_parameter("0.weight"))


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_gradients_are_incomplete_before_the_sums_over_processes(group: Any) -> None:
    layers, (x, y) = model(), batch()
    step_in_backward(layers, NUM_MICROBATCHES)
    plan = schedules.one_f_one_b(2, 4)
    with (
        planned(layers, plan, process_group=group) as pipe,
        pytest.raises(RuntimeError, match=EARLY),
    ):
        pipe.step(x, target=y)


def test_hooks_that_change_nothing_are_left_alone() -> None:
    layers, (x, y) = model(), batch()
    plain = copy.deepcopy(layers)
    seen: Counter[Tensor] = Counter()
    for held in layers.parameters():
        held.register_post_accumulate_grad_hook(lambda held: seen.update([held]))
    with planned(layers, schedules.gpipe(2, 4)) as pipe:
        pipe.step(x, target=y)
        plain_step(plain, x, y, F.mse_loss, NUM_MICROBATCHES)
        assert_same_state(pipe, plain)
    assert set(seen.values()) == {NUM_MICROBATCHES}
    hooks = [held._post_accumulate_grad_hooks for held in layers.parameters()]
    assert [len(of or ()) for of in hooks] == [1] * len(hooks)


@pytest.mark.parametrize("every", [1, NUM_MICROBATCHES])
def test_updates_on_gpus(gpus: FakeCuda, every: int) -> None:
    layers, (x, y) = model(), batch()
    plain = copy.deepcopy(layers)
    step_in_backward(layers, every)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with planned(layers, schedules.one_f_one_b(2, 4), devices="cuda") as pipe:
        if every == 1:
            with pytest.raises(RuntimeError, match=EARLY):
                pipe.step(x, target=y)
            return
        pipe.step(x, target=y)
        plain_step(plain, x, y, F.mse_loss, NUM_MICROBATCHES)
        optimizer.step()
        optimizer.zero_grad()
        assert_same_state(pipe, plain)
