"""Shared by the tests of the zoo."""

from tests.runtime.conftest import _one_thread_and_a_seed, gpus

__all__ = ["_one_thread_and_a_seed", "gpus"]
