"""Tensor parallel on a GPU: one process, to which NCCL gives a group of one, has all of a shard."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pykern.tensors.dtensor import whole
from tests import peers
from tests.gpu.test_pipeline import DEVICES
from tests.parallel.sharded import STYLES, batch_of, layers, pipeline

pytestmark = pytest.mark.gpu


def a_shard_of_one(_: int, devices: str) -> None:
    group: Any = dist.new_group([0], backend="nccl")
    found = []
    for parallel in (None, (group, STYLES)):
        options = {"devices": DEVICES[devices][0], "tensor_parallel": parallel}
        with pipeline(group, layers(), **options) as pipe:
            x, y = batch_of(0)
            loss = pipe.step(x, target=y)
            found.append(
                [loss, *(whole(p.grad).cpu() for p in pipe.parameters() if p.grad is not None)]
            )
    assert len(found[0]) == 1 + len(list(nn.Sequential(*layers()).parameters()))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("devices", ["the GPU twice", "two parts"])
def test_a_shard_of_one_is_the_whole(devices: str) -> None:
    peers.run(1, a_shard_of_one, devices)
