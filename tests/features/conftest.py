"""Shared by the tests of features."""

from pathlib import Path

import pytest

from tests.runtime.conftest import _one_thread_and_a_seed
from tests.runtime.test_ranges import recorder, run

__all__ = ["_one_thread_and_a_seed", "recorder", "root", "run"]


@pytest.fixture
def root() -> Path:
    return Path(__file__).parents[2]
