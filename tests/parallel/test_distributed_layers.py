"""Layers that torch has spread over processes already are refused with another way."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import pykern


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """This process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(module: nn.Module) -> Any:
    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def wrapped(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:FSDP is switching")
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (DistributedDataParallel, "DistributedDataParallel"),
        (sharded, "FSDPModule"),
        (wrapped, "FullyShardedDataParallel"),
    ],
)
def test_wrapped_layers_are_refused(make: Callable[[nn.Module], Any], name: str) -> None:
    models: dict[str, Any] = {
        "the model itself": [block(), make(block())],
        "0": [block(), nn.Sequential(make(block()))],
        "1": nn.Sequential(block(), make(block())),
        "the model": make(nn.Sequential(block(), block())),
    }
    for where, model in models.items():
        message = rf"modules of {name}, got {where}.*process_group=.*ZeroOptimizer"
        with pytest.raises(TypeError, match=message):
            pykern.Pipeline(model, devices="cpu:2", microbatches=2)
