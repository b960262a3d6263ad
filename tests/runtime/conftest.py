"""Shared by the runtime's tests."""

from collections.abc import Iterator

import pytest
import torch

from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import host_gpus


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> Iterator[None]:
    """A matrix product may sum in another order with another number of intra-op threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpus() -> Iterator[FakeCuda]:
    """Eight GPUs; in the end no rule is broken and nothing is left."""
    with host_gpus(8) as fake:
        yield fake


def expect_nothing_broken(fake: FakeCuda) -> None:
    """For a test of several pipelines, of which those so far must be gone."""
    fake.close()
    assert fake.violations == []
    assert fake.leaks == []
