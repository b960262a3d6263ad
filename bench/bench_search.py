"""Claim: at equal memory the search is never worse than a published schedule.

The whole grid takes minutes and is run by `python -m bench.search_grid`; this runs its corner.
"""

from __future__ import annotations

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from .search_grid import COSTS, MEMORY, Cell, run


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("costs", COSTS)
def test_search(benchmark: BenchmarkFixture, smoke: bool, costs: str, memory: float) -> None:
    cell = Cell(4, 8, costs, memory, budget_ms=2 if smoke else 100, max_chunks=4)
    # It asserts what is claimed.
    result = benchmark.pedantic(run, (cell,), rounds=1 if smoke else 3)
    benchmark.extra_info["bubble"] = result.bubble
