"""The search against the catalogue with all of its options, listed by brute force."""

import itertools
import random
from collections.abc import Callable
from functools import lru_cache

import pytest

from pykern.plan import Costs, Plan
from pykern.search import auto, published
from tests.search.every_option import best_of, every_option

CostsOf = Callable[[int], Costs]
MEMORY = (0.5, 0.625, 0.75, 0.859375, 1.0, 1.5)


def equal(num_devices: int) -> CostsOf:
    return lambda num_stages: Costs(num_devices / num_stages, 2 * num_devices / num_stages)


def measured(num_devices: int) -> CostsOf:
    """The costs of the 1.5B model in table 6 of the zero-bubble paper, with its latency."""

    def costs(num_stages: int) -> Costs:
        part = num_devices / num_stages
        inputs, weights = 18.086 * part, 9.337 * part
        return Costs(18.522 * part, inputs + weights, 0.601, input_ns=inputs, weight_ns=weights)

    return costs


def uneven(num_devices: int) -> CostsOf:
    """Stages that differ at random by up to three times, and hand-overs."""

    def costs(num_stages: int) -> Costs:
        rng = random.Random(num_stages)
        forward = [(0.5 + rng.random()) * num_devices / num_stages for _ in range(num_stages)]
        inputs = [time * (0.7 + 0.6 * rng.random()) for time in forward]
        weights = [time * (0.6 + 0.6 * rng.random()) for time in forward]
        whole = [i + w for i, w in zip(inputs, weights, strict=True)]
        return Costs(forward, whole, 0.05, input_ns=inputs, weight_ns=weights)

    return costs


@lru_cache(maxsize=1)
def catalogue(num_devices: int, num_microbatches: int) -> dict[str, Plan]:
    return every_option(num_devices, num_microbatches, 4)


@pytest.mark.parametrize("sizes", [(2, 12), (4, 18), (5, 7), (8, 24)])
def test_the_search_starts_from_all_that_is_published(sizes: tuple[int, int]) -> None:
    mine = published(*sizes, 4).values()
    listed = catalogue(*sizes).values()
    assert len(mine) == len(listed)
    assert all(plan in mine for plan in listed)


def require_never_worse(
    sizes: tuple[int, int], costs: Callable[[int], CostsOf], memory: float, budget_ms: float
) -> None:
    costs_of = costs(sizes[0])
    best_ns, name = best_of(catalogue(*sizes), costs_of, memory)
    found = auto(*sizes, costs=costs_of, memory=memory, budget_ms=budget_ms)
    # The search rounds times to a billionth.
    assert found.makespan_ns <= best_ns * (1 + 1e-9), name


@pytest.mark.parametrize(
    ("sizes", "costs", "memory"),
    [
        ((4, 16), uneven, 0.75),
        ((8, 16), measured, 0.859375),
        ((8, 32), measured, 0.859375),
        ((8, 32), uneven, 1.0),
        ((8, 64), equal, 0.859375),
        ((9, 36), measured, 1.5),
    ],
)
def test_it_is_never_worse_than_any_option_of_a_schedule(
    sizes: tuple[int, int], costs: Callable[[int], CostsOf], memory: float
) -> None:
    require_never_worse(sizes, costs, memory, budget_ms=10)


LARGER = [
    (num_devices, num_microbatches)
    for num_devices, counts in {
        2: (8, 32, 128),
        4: (8, 16, 64, 128),
        8: (16, 32, 64, 128),
        16: (32, 64, 100, 128),
        32: (64, 128),
    }.items()
    for num_microbatches in counts
]


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", LARGER)
def test_the_grid_of_sizes_has_no_cell_that_is_worse(sizes: tuple[int, int]) -> None:
    for costs, memory in itertools.product((equal, measured, uneven), MEMORY):
        require_never_worse(sizes, costs, memory, budget_ms=100)
