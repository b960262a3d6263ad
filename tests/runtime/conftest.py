"""Shared by the runtime's tests."""

import gc
from collections.abc import Iterator

import pytest
import torch

from pykern.runtime import cuda
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import HostGpus


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> Iterator[None]:
    """A matrix product may sum in another order with another number of intra-op threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1234)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """Eight GPUs; in the end no rule is broken and nothing is left."""
    fake = FakeCuda(num_devices=8)
    fake.allow_undeclared()
    monkeypatch.setattr(HostGpus, "fake", fake, raising=False)
    monkeypatch.setattr(cuda, "Gpus", HostGpus)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    yield fake
    gc.collect()
    fake.close()
    assert fake.violations == []
    assert fake.leaks == []
