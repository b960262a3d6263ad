"""Chimera: the paper's order op for op, and what two replicas promise."""

import pytest

from pykern import schedules
from pykern.plan import Action, Costs, Kind, Plan, check, simulate, with_reductions

# Microbatch, then d for the replica that runs down the devices or u for the one that runs up.
FIGURE = """
d0: F0.d F1.d F2.u B2.u F3.u B3.u B0.d B1.d
d1: F0.d F2.u F1.d F3.u B2.u B0.d B3.u B1.d
d2: F2.u F0.d F3.u F1.d B0.d B2.u B1.d B3.u
d3: F2.u F3.u F0.d B0.d F1.d B1.d B2.u B3.u
"""


def relabelled(cell: str, device: int, num_devices: int) -> Action:
    """The paper numbers one direction's microbatches, then the other's; we deal them in turn."""
    kind, microbatch, up = Kind[cell[0]], int(cell[1]), cell[3] == "u"
    if up:
        number = 2 * (microbatch - num_devices // 2) + 1
        return Action(kind, num_devices - 1 - device, number)
    return Action(kind, device, 2 * microbatch)


def test_the_order_is_the_papers() -> None:
    plan = schedules.chimera(4, 4)
    lines = FIGURE.strip().split("\n")
    rows = [[relabelled(c, d, 4) for c in line.split()[1:]] for d, line in enumerate(lines)]
    assert plan.rows == tuple(tuple(row) for row in rows)
    timeline = simulate(plan, Costs(1, 2))
    assert timeline.makespan_ns == 16
    assert [timeline.peak_in_flight(device) for device in range(4)] == [3, 4, 4, 3]


@pytest.mark.parametrize(("num_devices", "percent"), [(4, 25.0), (8, 33.3)])
def test_published_bubbles(num_devices: int, percent: float) -> None:
    timeline = simulate(schedules.chimera(num_devices, num_devices), Costs(1, 2))
    assert round(100 * timeline.bubble_ratio, 1) == percent


def stages_and_kinds(plan: Plan) -> list[tuple[int, Kind, list[int]]]:
    return [
        (stage, kind, [a.microbatch for a in row if (a.stage, a.kind) == (stage, kind)])
        for row in plan.rows
        for stage, kind in {(a.stage, a.kind) for a in row}
    ]


@pytest.mark.parametrize("doubling", [False, True])
@pytest.mark.parametrize("num_devices", [2, 4, 6, 8])
def test_any_number_of_microbatches_runs_and_each_replicas_ascend(
    num_devices: int, doubling: bool
) -> None:
    for num_microbatches in range(1, 4 * num_devices + 2):
        plan = schedules.chimera(num_devices, num_microbatches, doubling)
        check(plan)
        check(plan.forward_only())
        check(with_reductions(plan))
        for _, _, order in stages_and_kinds(plan):
            assert order == list(range(order[0], num_microbatches, 2))


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_doubling_runs_pairs_back_to_back(num_devices: int) -> None:
    plan = schedules.chimera(num_devices, 4 * num_devices, doubling=True)
    for row in plan.rows:
        for first, second in zip(row[::2], row[1::2], strict=True):
            assert (first.kind, first.stage) == (second.kind, second.stage)
            assert second.microbatch == first.microbatch + 2
    # A pair is laid out as one microbatch of the plan of half as many.
    single = schedules.chimera(num_devices, 2 * num_devices)
    for row, pairs in zip(single.rows, plan.rows, strict=True):
        halved = [(a.kind, a.stage, a.microbatch // 4 * 2 + a.microbatch % 2) for a in pairs[::2]]
        assert halved == [(a.kind, a.stage, a.microbatch) for a in row]
