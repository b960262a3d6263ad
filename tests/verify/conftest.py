"""Shared by the tests of verified steps."""

from tests.runtime.conftest import _one_thread_and_a_seed, gpus

__all__ = ["_one_thread_and_a_seed", "gpus"]
