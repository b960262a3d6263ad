"""Shared by the tests of checkpoints."""

from collections.abc import Iterator

import pytest

from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import host_gpus
from tests.runtime.conftest import _one_thread_and_a_seed

__all__ = ["_one_thread_and_a_seed", "gpus"]


@pytest.fixture
def gpus() -> Iterator[FakeCuda]:
    """Four GPUs; in the end no rule is broken and nothing is left."""
    with host_gpus(4) as fake:
        yield fake
