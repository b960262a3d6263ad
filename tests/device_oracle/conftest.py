"""The GPUs of the files that test_device_oracle.py runs."""

from collections.abc import Iterator

import pytest
import torch

from tests.device_oracle.oracle import gpus
from tests.fake_cuda.fake import FakeCuda


def pytest_itemcollected(item: pytest.Item) -> None:
    # torch says so of results that a kernel makes itself, which is how the oracle has the CPU's.
    resized = "ignore:An output with one or more elements was resized"
    item.add_marker(pytest.mark.filterwarnings(resized))


@pytest.fixture
def four_gpus() -> Iterator[FakeCuda]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with gpus(4) as fake:
        yield fake
