"""Data parallel between processes that share one GPU, where gloo takes the sums over the host.

NCCL has one process for each GPU, so with one GPU it gets a group of one.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pykern
from tests import peers
from tests.gpu.test_pipeline import DEVICES
from tests.parallel.reference import batch_of, layers

pytestmark = pytest.mark.gpu


def gradients(rank: int, devices: str, grouped: bool) -> dict[str, Tensor]:
    return one_step(rank, devices, dist.group.WORLD if grouped else None)


def one_step(rank: int, devices: str, group: Any) -> dict[str, Tensor]:
    with pykern.Pipeline(
        nn.Sequential(*layers()),
        devices=DEVICES[devices][0],
        schedule="one_f_one_b",
        microbatches=4,
        loss_fn=nn.functional.mse_loss,
        reduction="sum",
        process_group=group,
    ) as pipe:
        x, y = batch_of(0, rank, 8)
        pipe.step(x, target=y)
        return {name: p.grad.cpu() for name, p in pipe.named_parameters() if p.grad is not None}


def with_nccl(rank: int, devices: str) -> None:
    group = dist.new_group([0], backend="nccl")
    alone, grouped = (one_step(rank, devices, of) for of in (None, group))
    assert alone.keys() == grouped.keys()
    assert all(torch.equal(alone[name], grouped[name]) for name in alone)


@pytest.mark.parametrize("devices", ["the GPU twice", "two parts"])
def test_the_sum_over_processes_is_of_what_each_has_alone(devices: str) -> None:
    first, second = peers.run(2, gradients, devices, False)
    for of_process in peers.run(2, gradients, devices, True):
        assert of_process.keys() == first.keys()
        for name, gradient in of_process.items():
            assert torch.equal(gradient, first[name] + second[name]), name


@pytest.mark.parametrize("devices", ["the GPU twice", "two parts"])
def test_a_group_of_nccl_takes_the_gradients_of_every_lane(devices: str) -> None:
    peers.run(1, with_nccl, devices)
