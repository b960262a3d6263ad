"""The orders drawn in the papers, op for op. Written F or B, microbatch, dot, chunk."""

from collections.abc import Callable

import pytest

from pykern import schedules
from pykern.plan import Action, Costs, Kind, Placement, Plan, simulate

FIGURES: dict[str, tuple[Callable[[], Plan], float, list[float], str]] = {
    "1F1B": (
        lambda: schedules.one_f_one_b(4, 4),
        21.0,
        [4.0, 3.0, 2.0, 1.0],
        """
        d0: F0.0 F1.0 F2.0 F3.0 B0.0 B1.0 B2.0 B3.0
        d1: F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 B2.0 B3.0
        d2: F0.0 F1.0 B0.0 F2.0 B1.0 F3.0 B2.0 B3.0
        d3: F0.0 B0.0 F1.0 B1.0 F2.0 B2.0 F3.0 B3.0
        """,
    ),
    "interleaved, 2 chunks": (
        lambda: schedules.interleaved(4, 4, num_chunks=2),
        16.5,
        [4.0, 4.0, 3.5, 2.5],
        """
        d0: F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 B0.1 B1.1 B2.1 B3.1 B0.0 B1.0 B2.0 B3.0
        d1: F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 F3.1 B0.1 B1.1 B2.1 B3.1 B0.0 B1.0 B2.0 B3.0
        d2: F0.0 F1.0 F2.0 F3.0 F0.1 F1.1 F2.1 B0.1 F3.1 B1.1 B2.1 B3.1 B0.0 B1.0 B2.0 B3.0
        d3: F0.0 F1.0 F2.0 F3.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 B0.0 B1.0 B2.0 B3.0
        """,
    ),
    "Hanayo, 1 wave, 2 devices": (
        lambda: schedules.hanayo(2, 2, waves=1),
        8.0,
        [1.5, 2.0],
        """
        d0: F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0
        d1: F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0
        """,
    ),
    "Hanayo, 1 wave, 2 devices, 4 microbatches": (
        lambda: schedules.hanayo(2, 4, waves=1),
        15.0,
        [1.5, 2.0],
        """
        d0: F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 F2.0 B1.0 F3.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0
        d1: F0.0 F0.1 F1.0 F1.1 B0.1 B0.0 B1.1 B1.0 F2.0 F2.1 F3.0 F3.1 B2.1 B2.0 B3.1 B3.0
        """,
    ),
    "Hanayo, 1 wave, 4 devices": (
        lambda: schedules.hanayo(4, 4, waves=1),
        18.0,
        [2.5, 3.0, 3.5, 4.0],
        """
        d0: F0.0 F1.0 F2.0 F3.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 F3.1 B3.1 B0.0 B1.0 B2.0 B3.0
        d1: F0.0 F1.0 F2.0 F0.1 F3.0 F1.1 B0.1 F2.1 B1.1 F3.1 B2.1 B0.0 B3.1 B1.0 B2.0 B3.0
        d2: F0.0 F1.0 F0.1 F2.0 F1.1 F3.0 F2.1 B0.1 F3.1 B1.1 B0.0 B2.1 B1.0 B3.1 B2.0 B3.0
        d3: F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 F3.0 F3.1 B0.1 B0.0 B1.1 B1.0 B2.1 B2.0 B3.1 B3.0
        """,
    ),
    "Hanayo, 2 waves, 2 devices": (
        lambda: schedules.hanayo(2, 2, waves=2),
        7.0,
        [1.75, 2.0],
        """
        d0: F0.0 F1.0 F0.1 F0.2 F1.1 F1.2 F0.3 B0.3 F1.3 B1.3 B0.2 B0.1 B1.2 B1.1 B0.0 B1.0
        d1: F0.0 F0.1 F1.0 F1.1 F0.2 F0.3 F1.2 F1.3 B0.3 B0.2 B1.3 B1.2 B0.1 B0.0 B1.1 B1.0
        """,
    ),
}


def read_figure(text: str, placement: Placement) -> tuple[tuple[Action, ...], ...]:
    rows = []
    for device, line in enumerate(text.split("\n")[1:-1]):
        stages = [s for s, owner in enumerate(placement.replicas[0]) if owner == device]
        cells = [cell[0:1] + " " + cell[1:].replace(".", " ") for cell in line.split()[1:]]
        words = [cell.split() for cell in cells]
        rows.append(tuple(Action(Kind[k], stages[int(c)], int(m)) for k, m, c in words))
    return tuple(rows)


@pytest.mark.parametrize("name", FIGURES)
def test_the_order_is_the_papers(name: str) -> None:
    make, makespan, peaks, figure = FIGURES[name]
    plan = make()
    assert plan.rows == read_figure(figure, plan.placement)
    num_chunks = plan.num_stages // plan.num_devices
    timeline = simulate(plan, Costs(1 / num_chunks, 2 / num_chunks))
    assert timeline.makespan_ns == makespan
    shares = [timeline.peak_in_flight(d) / num_chunks for d in range(plan.num_devices)]
    assert shares == peaks


@pytest.mark.parametrize(
    ("num_devices", "waves", "makespan_in_chunk_forwards"), [(8, 2, 124), (4, 2, 60), (4, 4, 108)]
)
def test_makespans_of_hanayos_figure_6(
    num_devices: int, waves: int, makespan_in_chunk_forwards: int
) -> None:
    plan = schedules.hanayo(num_devices, num_devices, waves)
    assert simulate(plan, Costs(1, 2)).makespan_ns == makespan_in_chunk_forwards


# Strict repetition of the wave, and first-in-first-out dispatch at its peak, in T_F at T_B = 2 T_F.
@pytest.mark.parametrize(
    ("num_devices", "num_microbatches", "waves", "strict", "greedy", "optimised"),
    [(4, 8, 1, 33.0, 32.5, 31.5), (4, 8, 2, 28.5, 28.25, 27.75), (8, 16, 1, 69.0, 68.5, 65.5)],
)
def test_the_optimised_wave_beats_the_strict_one_and_greedy_dispatch_of_it(
    num_devices: int,
    num_microbatches: int,
    waves: int,
    strict: float,
    greedy: float,
    optimised: float,
) -> None:
    costs = Costs(1 / (2 * waves), 2 / (2 * waves))
    plan = schedules.hanayo(num_devices, num_microbatches, waves)
    assert simulate(plan, costs).makespan_ns == strict
    plan = schedules.hanayo(num_devices, num_microbatches, waves, optimised=True)
    assert simulate(plan, costs).makespan_ns == optimised < greedy


@pytest.mark.parametrize("num_devices", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_the_optimised_wave_never_loses_to_the_strict_one(num_devices: int, waves: int) -> None:
    for num_microbatches in range(1, 4 * num_devices + 2):
        strict = schedules.hanayo(num_devices, num_microbatches, waves)
        optimised = schedules.hanayo(num_devices, num_microbatches, waves, optimised=True)
        costs = Costs(1, 2)
        assert simulate(optimised, costs).makespan_ns <= simulate(strict, costs).makespan_ns
        if num_microbatches <= num_devices:
            assert optimised == strict


def test_hanayos_figure_3d_with_its_transfers() -> None:
    plan = schedules.hanayo(4, 4, waves=1)
    assert simulate(plan, Costs(1, 2, transfer_ns=1 / 8)).makespan_ns == 38


@pytest.mark.parametrize("num_devices", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("waves", [1, 2, 3])
def test_a_wave_is_a_warm_up_then_backwards_and_forwards_in_turn(
    num_devices: int, waves: int
) -> None:
    plan = schedules.hanayo(num_devices, num_devices, waves)
    for device, row in enumerate(plan.rows):
        kinds = "".join(action.kind.name for action in row)
        warmup = (2 * waves - 1) * num_devices + 1 + device
        rest = len(row) // 2 - warmup
        assert kinds == "F" * warmup + "BF" * rest + "B" * warmup
