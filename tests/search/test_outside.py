"""Plans for a loss outside of the pipeline: all forwards of a device before its backwards."""

import math
from dataclasses import replace

import pytest

from pykern import _C
from pykern.plan import Costs, Kind, Memory, Placement, check, peak_bytes, simulate
from pykern.plan.halves import forwards_first
from pykern.schedules import breadth_first, gpipe
from pykern.search import auto
from tests.search.exact import Instance, costs_of, shortest

MEASURED = Costs(18.522, 27.423, 0.601, input_ns=18.086, weight_ns=9.337)
UNSPLIT = Costs(2.0, 4.0, 0.5, input_ns=math.nan, weight_ns=math.nan)

SMALL = [
    Instance((0, 1), 3, forward=1, gradient=1, weight=1, hop=0, cap=3),
    Instance((0, 1), 3, forward=2, gradient=3, weight=1, hop=1, cap=3),
    Instance((0, 1, 1, 0), 2, forward=2, gradient=2, weight=1, hop=1, cap=4),
    Instance((0, 1, 0, 1), 2, forward=1, gradient=1, weight=1, hop=0, cap=4),
    Instance((0, 1, 2), 3, forward=2, gradient=2, weight=1, hop=1, cap=3),
]


def has_forwards_first(plan):
    return forwards_first(plan) == plan


@pytest.mark.parametrize("costs", [MEASURED, UNSPLIT], ids=["split", "whole"])
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(1, 4), (2, 3), (3, 8), (4, 13)])
def test_forwards_come_first_and_no_schedule_takes_less(num_devices, num_microbatches, costs):
    found = auto(num_devices, num_microbatches, costs=costs, budget_ms=2, loss="outside")
    check(found.plan)
    assert has_forwards_first(found.plan)
    assert simulate(found.plan, found.costs).makespan_ns == found.makespan_ns
    for chunks in (1, 2, 3, 4):
        plan = breadth_first(num_devices, num_microbatches, num_chunks=chunks)
        share = replace_times(costs, chunks)
        assert found.makespan_ns <= simulate(plan, share).makespan_ns * (1 + 1e-9)
    plan = gpipe(num_devices, num_microbatches)
    assert found.makespan_ns <= simulate(plan, costs).makespan_ns * (1 + 1e-9)
    assert found.makespan_ns <= min(found.seeds.values()) * (1 + 1e-9)
    assert not found.refused
    assert found.bound_ns <= found.makespan_ns * (1 + 1e-9)
    held = Memory(num_devices / found.plan.num_stages)
    assert found.peak == pytest.approx(peak_bytes(found.plan, held))
    assert max(found.peak) == pytest.approx(num_microbatches)


def replace_times(costs, chunks):
    return Costs(
        costs.forward_ns / chunks,
        costs.backward_ns / chunks,
        costs.transfer_ns,
        input_ns=costs.input_ns / chunks,
        weight_ns=costs.weight_ns / chunks,
    )


@pytest.mark.parametrize("instance", SMALL, ids=str)
def test_tiny_instances_are_solved(instance):
    num_devices = max(instance.device_of) + 1
    placement = Placement(num_devices, instance.device_of)
    candidate = _C.Candidate(placement, costs_of(instance), Memory(1), forwards_first=True)
    caps = [
        float(instance.num_microbatches * instance.device_of.count(d)) for d in range(num_devices)
    ]
    found = _C.search([candidate], instance.num_microbatches, caps, [], 20, 0)
    optimum = shortest(replace(instance, cap=max(map(int, caps)), forwards_first=True))
    assert found.makespan_ns == optimum
    assert found.bound_ns <= optimum
    assert has_forwards_first(found.plan)


def test_the_two_halves_of_gpipe_are_proven_optimal_where_nothing_splits():
    costs = Costs(1.0, 2.0, input_ns=math.nan, weight_ns=math.nan)
    found = auto(4, 8, costs=costs, max_chunks=1, loss="outside")
    assert found.proven
    assert found.makespan_ns == simulate(gpipe(4, 8), costs).makespan_ns == 33


def test_a_split_backward_fills_the_ramp_of_the_backwards():
    costs = Costs(1.0, 2.0, input_ns=1.0, weight_ns=1.0)
    found = auto(4, 8, costs=costs, max_chunks=1, loss="outside")
    assert found.proven
    # 3 + 8 forwards, then the first gradient arrives after 3 and 16 are left.
    assert found.makespan_ns == 11 + 3 + 16
    assert found.plan.has(Kind.I)


def test_all_activations_have_to_fit():
    with pytest.raises(ValueError, match=r"memory must be at least .* = 2 with loss='outside'"):
        auto(4, 8, memory=1.0, loss="outside")
    assert auto(4, 8, memory=2.0, budget_ms=0, loss="outside").cap == (8.0,) * 4
    with pytest.raises(ValueError, match="loss must be one of 'inside' or 'outside', got 'after'"):
        auto(4, 8, loss="after")  # type: ignore[arg-type]


def test_an_order_with_a_forward_behind_a_backward_is_not_a_start():
    candidate = _C.Candidate(Placement.linear(2), Costs(1, 2), Memory(1), forwards_first=True)
    mixed = auto(2, 4, budget_ms=0, max_chunks=1).plan
    assert not has_forwards_first(mixed)
    found = _C.search([candidate], 4, [4.0, 4.0], [(0, mixed)], 1, 0)
    assert found.seed_makespans_ns == (float("inf"),)
    assert has_forwards_first(found.plan)


def test_the_exact_solver_keeps_forwards_first():
    pytest.importorskip("ortools")
    from pykern.search.polish import polish  # noqa: PLC0415 - an extra

    found = auto(3, 4, costs=MEASURED, budget_ms=0, max_chunks=2, loss="outside")
    better = polish(found, 2)
    assert has_forwards_first(better.plan)
    assert found.bound_ns <= better.makespan_ns * (1 + 1e-9)
    assert better.makespan_ns <= found.makespan_ns
