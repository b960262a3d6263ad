"""Shared by the tests of the campaigns."""

from tests.runtime.conftest import _one_thread_and_a_seed

__all__ = ["_one_thread_and_a_seed"]
