"""Shared by the tests of features."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread_and_a_seed() -> Iterator[None]:
    """A matrix product may sum in another order with another number of intra-op threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(11)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def root() -> Path:
    return Path(__file__).parents[2]
