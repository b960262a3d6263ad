"""Published numbers of the schedules with split backward, beside their closed forms."""

from collections.abc import Callable
from functools import partial

import pytest

from pykern import schedules
from pykern.plan import Costs, Kind, Memory, Plan, peak_bytes, simulate


def bubble(plan: Plan, forward: int = 1, input_gradient: int = 1, weight: int = 1) -> float:
    """Idle time of a device, where a chunk takes these times."""
    costs = Costs(forward, input_gradient + weight, input_ns=input_gradient, weight_ns=weight)
    work = plan.num_stages // plan.num_devices * (forward + input_gradient + weight)
    return simulate(plan, costs).makespan_ns - plan.num_microbatches * work


def peak(plan: Plan, kept: float = 1.0) -> float:
    """Most activations of one device, in chunks, of which W keeps a part until its end."""
    return max(peak_bytes(plan, Memory(1, kept)))


@pytest.mark.parametrize("num_devices", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (2, 3, 1), (5, 4, 3)])
def test_the_papers_bubble_of_zb_h1(num_devices: int, times: tuple[int, int, int]) -> None:
    forward, input_gradient, weight = times
    plan = schedules.zb_h1(num_devices, 3 * num_devices)
    expected = (num_devices - 1) * (forward + input_gradient - weight)
    assert bubble(plan, *times) == expected
    assert peak(plan) == num_devices


@pytest.mark.parametrize("schedule", [schedules.zb_h2, schedules.zb_v])
@pytest.mark.parametrize("num_devices", [2, 3, 4, 8, 16])
def test_no_device_idles_between_its_first_action_and_its_last(
    schedule: Callable[[int, int], Plan], num_devices: int
) -> None:
    timeline = simulate(schedule(num_devices, 3 * num_devices), Costs(1, 2))
    for device, row in enumerate(timeline.rows):
        assert row[-1].end_ns - row[0].start_ns == timeline.busy_ns(device)


@pytest.mark.parametrize("num_devices", [2, 3, 4, 8, 16])
def test_the_papers_span_of_zb_h2(num_devices: int) -> None:
    plan = schedules.zb_h2(num_devices, 3 * num_devices)
    for forward, input_gradient, weight in [(2, 2, 1), (2, 3, 1), (5, 4, 3)]:
        costs = Costs(forward, input_gradient + weight, input_ns=input_gradient, weight_ns=weight)
        timeline = simulate(plan, costs)
        spans = [row[-1].end_ns - row[0].start_ns for row in timeline.rows]
        expected = (num_devices - 1) * max(forward + input_gradient - 2 * weight, 0)
        assert max(spans) - timeline.busy_ns(0) == expected


@pytest.mark.parametrize("num_devices", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
def test_gis_trades_memory_for_slots(num_devices: int, num_chunks: int) -> None:
    for group in range((num_devices + 1) // 2, num_devices + 1):
        plan = schedules.gis(num_devices, 4 * group, num_chunks, group)
        more = (num_chunks - 1) * (num_devices - group)
        assert bubble(plan) == 2 * (num_devices - 1) + more
        assert peak(plan) == (num_chunks - 1) * group + num_devices


@pytest.mark.parametrize("half", [1, 2, 4, 8])
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (2, 3, 1), (1, 2, 2), (5, 4, 3)])
def test_the_papers_bubble_and_peak_of_gis_h(
    half: int, num_chunks: int, times: tuple[int, int, int]
) -> None:
    num_devices = 2 * half
    plan = schedules.gis(num_devices, 2 * num_devices, num_chunks, group=half)
    forward, input_gradient, weight = times
    first = (num_devices - 1) * (forward + input_gradient)
    more = (num_chunks - 1) * half * (forward + input_gradient - weight)
    assert bubble(plan, *times) == first + more
    assert peak(plan) == half * (num_chunks + 1)


@pytest.mark.parametrize("num_devices", range(3, 17))
def test_v_half_and_v_min_against_the_bound_of_their_placement(num_devices: int) -> None:
    num_microbatches = 2 * num_devices
    off_bound: dict[Callable[[int, int], Plan], float] = {
        schedules.v_half: num_devices % 2 * (num_devices - 1) / 2,
        partial(schedules.v_half, early=True): 0,
        schedules.v_min: 2 * (num_devices % 3 == 2),
    }
    for schedule, off in off_bound.items():
        plan = schedule(num_devices, num_microbatches)
        bound = 6 * num_devices - 3 * peak(plan) - 1
        assert bubble(plan) == bound + off
    half = schedules.v_half(num_devices, num_microbatches)
    assert peak(half) / 2 == (num_devices + 2) // 2
    assert peak(schedules.v_min(num_devices, num_microbatches)) / 2 == (num_devices + 4) // 3
    if num_devices % 2 == 0:
        assert bubble(half) / 2 == 1.5 * num_devices - 3.5


@pytest.mark.parametrize("num_devices", [4, 5, 8, 16])
@pytest.mark.parametrize(
    "times", [(18.522, 18.086, 9.337), (2, 2, 1), (10, 13, 7), (2, 3, 1)], ids=str
)
def test_v_half_keeps_its_period_at_other_times(
    num_devices: int, times: tuple[float, float, float]
) -> None:
    """W that stay where the block has them, against F and I that go in front of them."""
    forward, backward, weight = times
    costs = Costs(forward, backward + weight, input_ns=backward, weight_ns=weight)
    steady = schedules.v_half(num_devices, 8 * num_devices)
    early = schedules.v_half(num_devices, 8 * num_devices, early=True)
    assert peak(steady) == peak(early)
    assert simulate(steady, costs).makespan_ns < 0.98 * simulate(early, costs).makespan_ns


def test_optima_at_four_devices_and_eight_microbatches() -> None:
    """Proven by an exact solver for the placement and memory, in forwards of a device."""
    assert bubble(schedules.zb_h1(4, 8)) == 3
    assert bubble(schedules.interleaved_zb(4, 8, num_chunks=2)) / 2 == 1.5
    assert bubble(schedules.interleaved_zb(4, 8, num_chunks=4)) / 4 == 0.75
    assert bubble(schedules.zb_v(4, 8)) / 2 == 1.5
    assert bubble(schedules.v_half(4, 8)) / 2 == 2.5
    assert bubble(schedules.v_min(4, 8)) / 2 == 5.5


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("beyond", [0, 1, 5])
def test_gradients_of_dualpipe_v_ascend_although_some_backwards_are_whole(
    num_devices: int, beyond: int
) -> None:
    num_microbatches = 2 * num_devices + beyond
    plan = schedules.dualpipe_v(num_devices, num_microbatches)
    assert plan.has(Kind.B)
    assert plan.has(Kind.I)
    for row in plan.rows:
        for stage in {action.stage for action in row}:
            for kinds in ({Kind.F}, {Kind.B, Kind.I}, {Kind.B, Kind.W}):
                order = [a.microbatch for a in row if a.stage == stage and a.kind in kinds]
                assert order == list(range(num_microbatches))
