"""Shared by the tests of other libraries' faces. Many hold torch.distributed.pipelining beside."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> Iterator[None]:
    """A matrix product may sum in another order with another number of intra-op threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def _group_of_one() -> Iterator[None]:
    """torch's stages need a process group, if only of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
