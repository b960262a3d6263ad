"""The simulator against the closed forms, exactly: the times are integers and so are all sums.

The forms are those of the schedules as drawn. Hanayo's printed equation (1) is not one of them: it
disagrees with its own figures (schedules/hanayo.py says where).
"""

from collections.abc import Callable

import pytest

from pykern import schedules
from pykern.plan import Costs, Plan, Timeline, simulate

# T_F of one device's share; the number of chunks divides it, and a transfer is small beside it.
T_F = 3 * 2**12
T_BS = [T_F, T_F * 3 // 2, T_F * 2, T_F * 3]


def shared(plan: Plan, forward: int, backward: int, transfer: int = 0) -> Timeline:
    """The plan's timeline where a device's whole share takes these times."""
    num_chunks = plan.num_stages // plan.num_devices
    return simulate(plan, Costs(forward / num_chunks, backward / num_chunks, transfer))


@pytest.mark.parametrize("num_devices", [2, 4, 8, 16])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("backward", T_BS)
class TestWithoutTransfers:
    def test_gpipe_and_one_f_one_b(self, num_devices: int, groups: int, backward: int) -> None:
        num_microbatches = groups * num_devices
        expected = (num_microbatches + num_devices - 1) * (T_F + backward)
        for schedule in (schedules.gpipe, schedules.one_f_one_b):
            timeline = shared(schedule(num_devices, num_microbatches), T_F, backward)
            assert timeline.makespan_ns == expected

    @pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
    def test_interleaved(
        self, num_devices: int, groups: int, backward: int, num_chunks: int
    ) -> None:
        num_microbatches = groups * num_devices
        plan = schedules.interleaved(num_devices, num_microbatches, num_chunks)
        ideal = num_microbatches * (T_F + backward)
        idle = (num_devices - 1) * (T_F + backward) // num_chunks
        assert shared(plan, T_F, backward).makespan_ns == ideal + idle

    @pytest.mark.parametrize("waves", [1, 2, 4])
    def test_hanayo(self, num_devices: int, groups: int, backward: int, waves: int) -> None:
        num_microbatches = groups * num_devices
        timeline = shared(schedules.hanayo(num_devices, num_microbatches, waves), T_F, backward)
        ideal = num_microbatches * (T_F + backward)
        idle = (num_devices - 1) * (backward + (groups - 1) * (backward - T_F)) // waves
        assert timeline.makespan_ns == ideal + idle
        assert timeline.bubble_ratio == pytest.approx(idle / (ideal + idle), rel=1e-12)


def extra_one_f_one_b(num_devices: int, groups: int) -> int:
    return 2 * (groups + 1) * (num_devices - 1) - 2


def extra_gpipe(num_devices: int, _: int) -> int:
    return 2 * (num_devices - 1)


def extra_interleaved(num_chunks: int) -> Callable[[int, int], int]:
    return lambda num_devices, _: 2 * (num_chunks * num_devices - 1)


def extra_hanayo(waves: int) -> Callable[[int, int], int]:
    return lambda num_devices, groups: (
        4 * waves * groups * (num_devices - 1) + 2 * (num_devices - 1) - 2 * groups
    )


def extra_breadth_first(num_chunks: int) -> Callable[[int, int], int]:
    def extra(num_devices: int, groups: int) -> int:
        return 2 * ((num_chunks if groups == 1 else 1) * num_devices - 1)

    return extra


def extra_chimera(num_devices: int, groups: int) -> int:
    return groups * (2 * num_devices - 4) + num_devices - 1


# Schedule, sizes at which the form was derived, transfers on the critical path.
TRANSFERS = {
    "gpipe": (schedules.gpipe, {}, [2, 3, 4, 5, 8], extra_gpipe),
    "one_f_one_b": (schedules.one_f_one_b, {}, [3, 4, 5, 8], extra_one_f_one_b),
    "interleaved-2": (schedules.interleaved, {"num_chunks": 2}, [4, 8], extra_interleaved(2)),
    "interleaved-4": (schedules.interleaved, {"num_chunks": 4}, [4, 8], extra_interleaved(4)),
    "one_f_one_b_eager": (schedules.one_f_one_b_eager, {}, [2, 3, 4, 5, 8], extra_gpipe),
    **{
        f"breadth_first-{v}": (
            schedules.breadth_first,
            {"num_chunks": v},
            [4, 8],
            extra_breadth_first(v),
        )
        for v in (2, 4)
    },
    "chimera": (schedules.chimera, {}, [4, 6, 8, 16], extra_chimera),
    "hanayo-1": (schedules.hanayo, {"waves": 1}, [2, 4, 8], extra_hanayo(1)),
    "hanayo-2": (schedules.hanayo, {"waves": 2}, [2, 4, 8], extra_hanayo(2)),
    "hanayo-4": (schedules.hanayo, {"waves": 4}, [2, 4, 8], extra_hanayo(4)),
}


@pytest.mark.parametrize("name", TRANSFERS)
@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("transfer", [1, T_F // 1024])
def test_small_transfers_add_up_on_the_critical_path(name: str, groups: int, transfer: int) -> None:
    schedule, options, sizes, extra = TRANSFERS[name]
    for num_devices in sizes:
        plan = schedule(num_devices, groups * num_devices, **options)
        with_transfers = shared(plan, T_F, 2 * T_F, transfer).makespan_ns
        without = shared(plan, T_F, 2 * T_F).makespan_ns
        assert with_transfers - without == extra(num_devices, groups) * transfer


# Makespan in T_F at P = M = 4, T_B = 2 T_F, T_C = 0.1 T_F, as bubble ratio in percent.
@pytest.mark.parametrize(
    ("plan", "percent"),
    [
        (schedules.gpipe(4, 4), 44.4),
        (schedules.one_f_one_b(4, 4), 45.5),
        (schedules.one_f_one_b_eager(4, 4), 44.4),
        (schedules.breadth_first(4, 4, 2), 33.0),
        (schedules.breadth_first(4, 4, 4), 30.4),
        (schedules.breadth_first(4, 4, 8), 37.9),
        (schedules.chimera(4, 4), 28.1),
        (schedules.interleaved(4, 4, 2), 33.0),
        (schedules.interleaved(4, 4, 4), 30.4),
        (schedules.interleaved(4, 4, 8), 37.9),
        (schedules.hanayo(4, 4, 1), 38.8),
        (schedules.hanayo(4, 4, 2), 32.6),
        (schedules.hanayo(4, 4, 4), 35.8),
    ],
)
def test_tabulated_bubbles_with_transfers(plan: Plan, percent: float) -> None:
    timeline = shared(plan, 40, 80, transfer=4)
    assert round(100 * timeline.bubble_ratio, 1) == percent
