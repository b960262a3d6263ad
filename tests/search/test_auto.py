import itertools
import signal
import time
from typing import Any

import pytest

from pykern import _C
from pykern.plan import Costs, Kind, Memory, Placement, check, peak_bytes, simulate
from pykern.schedules import one_f_one_b
from pykern.search import auto, placement_name, placements, published, wave_of
from pykern.search.polish import polish

MEASURED = Costs(18.522, 27.423, 0.601, input_ns=18.086, weight_ns=9.337)
WRONG: Any = "x"
MAKES_NUMBERS: Any = lambda _: 3  # noqa: E731 - of no type that is right
CASES = list(itertools.product([2, 3, 4], [3, 8, 13], [0.5, 0.75, 1.0, 3.0]))


@pytest.mark.parametrize(("num_devices", "num_microbatches", "memory"), CASES)
def test_the_plan_is_sound_and_never_worse_than_a_seed(num_devices, num_microbatches, memory):
    found = auto(num_devices, num_microbatches, costs=MEASURED, memory=memory, budget_ms=2)
    plan = found.plan
    check(plan)
    assert simulate(plan, found.costs).makespan_ns == found.makespan_ns
    held = Memory(num_devices / plan.num_stages)
    assert max(peak_bytes(plan, held)) <= memory * num_devices * (1 + 1e-9)
    assert found.peak == pytest.approx(peak_bytes(plan, held))
    assert found.bound_ns <= found.makespan_ns
    # The search rounds times to a billionth.
    assert found.makespan_ns <= min(found.seeds.values(), default=float("inf")) * (1 + 1e-9)
    for kinds in ({Kind.F}, {Kind.B, Kind.I}, {Kind.B, Kind.W}):
        assert ascending(plan, kinds)


def ascending(plan, kinds):
    """Whether microbatches of each stage run in ascending order, as gradients add up by B and W."""
    return all(
        list(group) == sorted(group)
        for row in plan.rows
        for stage in range(plan.num_stages)
        if (group := [a.microbatch for a in row if a.kind in kinds and a.stage == stage])
    )


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_search_ends_where_there_is_nothing_to_move(num_microbatches):
    costs = Costs(1, 9, 0.5, input_ns=1, weight_ns=8)
    found = auto(3, num_microbatches, costs=costs, memory=0.4, budget_ms=5, max_chunks=1)
    assert found.bound_ns <= found.makespan_ns


def test_what_keeps_the_cap_is_a_seed_with_its_makespan():
    found = auto(4, 8, budget_ms=0)
    plan = one_f_one_b(4, 8)
    assert found.seeds["one_f_one_b"] == simulate(plan, Costs(1, 2)).makespan_ns
    assert "gpipe" in found.refused
    assert set(found.seeds) | set(found.refused) == set(published(4, 8, 4))


def test_without_budget_it_is_a_seed_or_better():
    for memory in (0.5, 1.0, 2.0):
        found = auto(4, 8, memory=memory, budget_ms=0)
        assert found.makespan_ns <= min(found.seeds.values(), default=float("inf"))


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_of_equal_plans_it_takes_that_with_the_fewest_actions(num_microbatches):
    found = auto(1, num_microbatches)
    assert found.plan.num_actions == 2 * num_microbatches
    assert found.proven
    unequal = auto(4, 8, costs=Costs(1.0, 2.0, input_ns=1.0, weight_ns=1.0), budget_ms=2)
    fewest = min(
        plan.num_actions
        for name, plan in published(4, 8, 4).items()
        if unequal.seeds.get(name, float("inf")) <= unequal.makespan_ns * (1 + 1e-9)
    )
    assert unequal.plan.num_actions <= fewest


def test_the_same_arguments_give_the_same_plan():
    one, other = (auto(4, 9, costs=MEASURED, memory=0.5, budget_ms=20, seed=3) for _ in range(2))
    assert one.plan == other.plan
    assert str(one) == str(other)


def test_more_budget_is_spent_within_reason():
    work = [auto(4, 8, memory=0.5, budget_ms=budget).work_ms for budget in (5, 20)]
    assert work[0] < 8
    assert 15 < work[1] < 24


def test_a_steady_part_is_repeated_for_many_microbatches():
    few, many = (auto(4, count, memory=0.75, budget_ms=60) for count in (16, 400))
    check(many.plan)
    assert max(many.peak) <= 3
    # The bubble stays about what it is for few.
    bubbles = [found.makespan_ns - 3 * found.plan.num_microbatches for found in (few, many)]
    assert bubbles[1] < 2 * bubbles[0]


def test_an_interrupt_ends_a_search():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    start = time.perf_counter()
    try:
        with pytest.raises(KeyboardInterrupt):
            auto(4, 8, memory=0.5, budget_ms=1e6)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.perf_counter() - start < 5


def test_caps_of_each_device_are_kept():
    memory = (1.0, 0.5, 0.75, 1.5)
    found = auto(4, 8, memory=memory, budget_ms=20)
    assert found.cap == tuple(4 * each for each in memory)
    assert all(peak <= cap for peak, cap in zip(found.peak, found.cap, strict=True))


def test_what_is_kept_counts_to_the_end_of_the_weight_gradient():
    found = auto(4, 8, memory=0.5, kept=0.25, budget_ms=20)
    share = 4 / found.plan.num_stages
    assert max(peak_bytes(found.plan, Memory(share, share / 4))) <= 2
    assert found.makespan_ns <= auto(4, 8, memory=0.5, budget_ms=20).makespan_ns


def test_unequal_stages_come_from_a_function():
    def costs(num_stages):
        times = [1 + (stage == num_stages - 1) for stage in range(num_stages)]
        return Costs(times, [2 * time for time in times])

    found = auto(2, 4, costs=costs, budget_ms=5)
    assert found.costs == costs(found.plan.num_stages)


def test_a_split_that_costs_is_not_made_where_nothing_is_won():
    costs = Costs(1, 2, input_ns=1.2, weight_ns=1.2)
    assert not auto(1, 4, costs=costs, budget_ms=5).plan.has(Kind.I)
    # On several devices some splits pay and some do not.
    plan = auto(4, 8, costs=costs, budget_ms=50).plan
    assert plan.has(Kind.I)
    assert plan.has(Kind.B)


def test_latency_is_counted():
    slow = auto(4, 8, costs=Costs(1, 2, 0.4), budget_ms=20)
    assert slow.makespan_ns > auto(4, 8, budget_ms=20).makespan_ns
    assert slow.makespan_ns == simulate(slow.plan, slow.costs).makespan_ns


def test_overhead_speeds_and_bandwidth_are_counted():
    costs = Costs(
        1, 2, overhead_ns=0.05, message_bytes=3, bandwidth=10, device_speeds=[1.0, 2.0, 1.0, 0.5]
    )
    found = auto(4, 8, costs=costs, budget_ms=10)
    assert found.makespan_ns == pytest.approx(simulate(found.plan, found.costs).makespan_ns)
    assert found.bound_ns >= 8 * 2 * 3
    with pytest.raises(ValueError, match="shared_links must be False for a search"):
        auto(4, 8, costs=Costs(1, 2, shared_links=True))


def test_it_says_what_it_found():
    text = str(auto(4, 8, costs=Costs(1e6, 2e6)))
    assert "makespan 24.75 ms, lower bound 24.75 ms: proven optimal" in text
    assert "memory 1x of at most 1x" in text
    assert "25.0% less time than one_f_one_b" in text
    assert "over the memory cap: gpipe" in text
    gap = auto(4, 8, memory=0.5, budget_ms=1)
    assert f"at most {gap.gap:.1%} above the optimum" in str(gap)


def test_placements_are_named():
    names = [placement_name(each) for each in placements(4, 4)]
    assert names == [
        "linear",
        "looped, 2 chunks a device",
        "looped, 3 chunks a device",
        "looped, 4 chunks a device",
        "V",
        "wave of 3 chunks a device",
        "wave of 4 chunks a device",
    ]
    assert wave_of(4, 4) == Placement.wave(4, 2)
    assert wave_of(2, 3).replicas == ((0, 1, 1, 0, 0, 1),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"memory": 0.0}, "memory must be finite and above 0, got 0"),
        ({"memory": [1.0, 1.0]}, "one for each of 4 devices"),
        ({"memory": 0.2}, r"memory must be at least 1 / num_devices = 0\..*, got 0.2"),
        ({"kept": 1.5}, "kept must be 0 to 1, got 1.5"),
        ({"budget_ms": -1}, "budget_ms must be 0 to 1e9"),
        ({"seed": -1}, r"seed must be a whole number from 0 to 2\*\*64 - 1, got -1"),
        ({"seed": 0.5}, r"seed must be a whole number .* got 0\.5"),
        ({"max_chunks": 0}, "max_chunks must be 1"),
        ({"costs": Costs(0, 0)}, "costs must have an action that takes time"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        auto(4, 8, **arguments)


@pytest.mark.parametrize("arguments", [{"memory": "1"}, {"memory": [1.0] * 3 + [None]}])
def test_memory_that_is_no_number_is_refused(arguments):
    with pytest.raises(TypeError, match="memory must be a number, got "):
        auto(4, 8, **arguments)


def test_a_budget_that_is_no_number_is_refused():
    arguments: dict[str, Any] = {"budget_ms": "3"}
    with pytest.raises(TypeError, match="budget_ms must be a number, got '3'"):
        auto(4, 8, **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auto(2, 2, costs=WRONG), "costs must be Costs, or a function from .*, got 'x'"),
        (lambda: auto(2, 2, costs=MAKES_NUMBERS), "costs must return Costs for a number .*, got 3"),
        (lambda: auto(2, 2, kept=WRONG), "kept must be a number, got 'x'"),
        (lambda: polish(WRONG, 1), "found must be the result of pykern.search.auto, got 'x'"),
        (lambda: list(placements(WRONG, 1)), "num_devices must be an int, got 'x'"),
        (lambda: published(2, WRONG, 1), "num_microbatches must be an int, got 'x'"),
        (lambda: wave_of(2, WRONG), "num_chunks must be an int, got 'x'"),
    ],
)
def test_wrong_types_are_refused(call, message):
    """Errors of Python and pybind11 came."""
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("num_stages", [2, 4, 6])
def test_costs_of_stages_are_for_plans_of_as_many(num_stages):
    costs = Costs([1.0 + stage for stage in range(num_stages)], 3.0, message_bytes=[1] * num_stages)
    found = auto(2, 5, costs=costs, memory=2, budget_ms=5)
    assert found.plan.num_stages == num_stages
    assert found.costs == costs
    assert found.makespan_ns == simulate(found.plan, costs).makespan_ns


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs([1.0] * 5, 2.0), "forward_ns must .* is 4 or 8 or 12 or 16 here, got 5. Change"),
        (Costs(1, 2, message_bytes=[1, 1]), "message_bytes must .* 4 or 8 .* got 2"),
        (Costs([1.0] * 4, [2.0] * 8), r"backward_ns must .* is 4 here, got 8"),
    ],
)
def test_costs_of_another_number_of_stages_are_refused(costs, message):
    with pytest.raises(ValueError, match=message):
        auto(4, 8, costs=costs)


def test_a_seed_must_have_the_placement_and_the_microbatches():
    candidate = _C.Candidate(Placement.linear(2), Costs(1, 2), Memory(1))
    with pytest.raises(ValueError, match="placement of a seed must be that of its candidate"):
        _C.search([candidate], 4, [2.0, 2.0], [(0, one_f_one_b(3, 4))], 1, 0)
    with pytest.raises(ValueError, match="num_microbatches of a seed"):
        _C.search([candidate], 4, [2.0, 2.0], [(0, one_f_one_b(2, 5))], 1, 0)
    with pytest.raises(ValueError, match="candidate of a seed"):
        _C.search([candidate], 4, [2.0, 2.0], [(1, one_f_one_b(2, 4))], 1, 0)


@pytest.mark.parametrize("counts", [(4, 2**20), (2**12, 2**10), (2**24, 2**24)])
def test_a_search_of_implausible_size_is_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be at most 524288, got"):
        auto(*counts, budget_ms=1)


def test_a_search_for_one_microbatch_tells_of_one() -> None:
    found = str(auto(1, 1, max_chunks=1))
    assert found.startswith("linear, 1 stage, 1 microbatch\n")
