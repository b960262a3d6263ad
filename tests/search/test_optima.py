"""The search against optima that others have proven, and its bounds against them too."""

import pytest

from pykern import _C
from pykern.plan import Costs, Memory, Placement
from pykern.search import auto, wave_of
from tests.search.exact import Instance, costs_of, shortest

# A proven optimum is never undercut, and no bound is above it.
SMALL = [
    Instance((0, 1), 3, forward=1, gradient=1, weight=1, hop=0, cap=2),
    Instance((0, 1), 3, forward=1, gradient=1, weight=1, hop=0, cap=1),
    Instance((0, 1), 3, forward=2, gradient=3, weight=1, hop=1, cap=2),
    Instance((0, 1, 1, 0), 2, forward=1, gradient=1, weight=1, hop=0, cap=4),
    Instance((0, 1, 1, 0), 2, forward=2, gradient=2, weight=1, hop=1, cap=3),
    Instance((0, 1, 0, 1), 2, forward=1, gradient=1, weight=1, hop=0, cap=3),
    Instance((0, 1, 2), 3, forward=2, gradient=2, weight=1, hop=1, cap=2),
]

# Placement, memory in 1F1B's, bubble in forwards of a device's share: four devices, eight
# microbatches, forward, input and weight gradient alike; each proven by CP-SAT.
PROVEN = [
    (Placement.linear(4), 1.0, 3.0),
    (Placement.linear(4), 0.75, 7.0),
    (Placement.linear(4), 0.5, 17.0),
    (Placement.looped(4, 2), 1.0, 1.5),
    (Placement.looped(4, 2), 0.75, 2.5),
    (Placement.looped(4, 2), 0.5, 7.5),
    (Placement.wave(4, 1), 1.0, 1.5),
    (Placement.wave(4, 1), 0.75, 2.5),
    (Placement.wave(4, 1), 0.625, 4.0),
    (Placement.wave(4, 1), 0.5, 5.5),
    (Placement.wave(4, 1), 0.375, 19.0),
    (wave_of(4, 3), 1.0, 1.0),
    (wave_of(4, 3), 0.75, 2.0),
    (Placement.wave(4, 2), 1.0, 0.75),
    (Placement.wave(4, 2), 0.75, 1.75),
    (Placement.wave(4, 2), 0.5, 3.75),
    (Placement.wave(4, 2), 0.375, 8.75),
    (Placement.looped(4, 4), 1.0, 0.75),
    (Placement.looped(4, 4), 0.625, 2.25),
    (Placement.looped(4, 4), 0.5, 4.0),
]
# Those among them that a short search finds: at 0.75 the loop of two chunks takes it longer.
QUICK = [
    case
    for case in PROVEN
    if case[1] >= 0.75 and case[0].num_stages < 16 and case[:2] != (Placement.looped(4, 2), 0.75)
]


def search_one(placement, memory, budget_ms, num_microbatches=8):
    chunks = placement.num_stages / placement.num_devices
    candidate = _C.Candidate(placement, Costs(1 / chunks, 2 / chunks), Memory(1 / chunks))
    caps = [memory * placement.num_devices] * placement.num_devices
    return _C.search([candidate], num_microbatches, caps, [], budget_ms, 0)


@pytest.mark.parametrize("instance", SMALL, ids=str)
def test_tiny_instances_are_solved(instance):
    num_devices = max(instance.device_of) + 1
    placement = Placement(num_devices, instance.device_of)
    candidate = _C.Candidate(placement, costs_of(instance), Memory(1))
    caps = [float(instance.cap)] * num_devices
    found = _C.search([candidate], instance.num_microbatches, caps, [], 20, 0)
    optimum = shortest(instance)
    assert found.makespan_ns == optimum
    assert found.bound_ns <= optimum


@pytest.mark.parametrize(("placement", "memory", "optimum"), PROVEN)
def test_no_bound_is_above_a_proven_optimum(placement, memory, optimum):
    found = search_one(placement, memory, budget_ms=1)
    # Thirds are not exact in binary.
    assert found.bound_ns <= 24 + optimum <= found.makespan_ns * (1 + 1e-12)


@pytest.mark.parametrize(("placement", "memory", "optimum"), QUICK)
def test_published_optima_are_found(placement, memory, optimum):
    assert search_one(placement, memory, budget_ms=300).makespan_ns == pytest.approx(24 + optimum)


@pytest.mark.parametrize("memory", [1.0, 0.75])
def test_optima_over_all_placements_are_proven(memory):
    """At most four chunks: 0.75 forwards of bubble at full memory, 1.75 at three quarters."""
    found = auto(4, 8, memory=memory, budget_ms=1000)
    assert found.makespan_ns == 24 + {1.0: 0.75, 0.75: 1.75}[memory]
    assert found.proven
