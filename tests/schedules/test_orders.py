"""Orders and counts that no drawing shows: groups, slices, streams."""

import pytest

from pykern import schedules
from pykern.plan import Action, Costs, Kind, Plan, check, simulate


def megatron(
    num_devices: int, num_microbatches: int, num_chunks: int, group: int
) -> list[list[Action]]:
    """Megatron's interleaved order from its table of virtual microbatches."""
    table = [
        (microbatch, chunk)
        for start in range(0, num_microbatches, group)
        for chunk in range(num_chunks)
        for microbatch in range(start, min(start + group, num_microbatches))
    ]
    rows = []
    for device in range(num_devices):
        warmup = min(2 * (num_devices - device - 1) + (num_chunks - 1) * group, len(table))
        keyed = []
        for number, (microbatch, chunk) in enumerate(table):
            forward = Action(Kind.F, chunk * num_devices + device, microbatch)
            reverse = num_chunks - 1 - chunk
            backward = Action(Kind.B, reverse * num_devices + device, microbatch)
            keyed += [(2 * number, forward), (2 * (number + warmup) + 1, backward)]
        rows.append([action for _, action in sorted(keyed, key=lambda entry: entry[0])])
    return rows


@pytest.mark.parametrize("num_devices", [2, 3, 4])
@pytest.mark.parametrize("larger", [0, 1, 3])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_interleaved_groups_are_megatrons(
    num_devices: int, larger: int, num_groups: int, num_chunks: int
) -> None:
    group = num_devices + larger
    num_microbatches = num_groups * group
    plan = schedules.interleaved(num_devices, num_microbatches, num_chunks, group)
    theirs = megatron(num_devices, num_microbatches, num_chunks, group)
    assert [list(row) for row in plan.rows] == theirs


@pytest.mark.parametrize(("num_devices", "num_chunks"), [(2, 2), (4, 2), (4, 3), (8, 2)])
def test_larger_groups_wait_less_for_transfers_and_hold_more(
    num_devices: int, num_chunks: int
) -> None:
    num_microbatches = 4 * num_devices
    usual = schedules.interleaved(num_devices, num_microbatches, num_chunks)
    larger = schedules.interleaved(num_devices, num_microbatches, num_chunks, 2 * num_devices)
    without, costs = Costs(1, 2), Costs(1, 2, transfer_ns=1 / 16)
    assert simulate(larger, without).makespan_ns == simulate(usual, without).makespan_ns
    timeline = simulate(larger, costs)
    assert timeline.makespan_ns < simulate(usual, costs).makespan_ns
    for device in range(num_devices):
        held = 2 * (num_devices - 1 - device) + (num_chunks - 1) * 2 * num_devices + 1
        assert timeline.peak_in_flight(device) == held


def test_groups_of_at_least_the_size_asked_for() -> None:
    forwards = [a for a in schedules.interleaved(2, 11, 2, group=5).rows[0] if a.kind is Kind.F]
    stages = "".join(str(action.stage) for action in forwards)
    assert stages == "0" * 6 + "2" * 6 + "0" * 5 + "2" * 5


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_a_stream_holds_every_forward_once_in_order(num_devices: int, num_chunks: int) -> None:
    for num_microbatches in range(1, 4 * num_devices + 2):
        plan = schedules.forward_only(num_devices, num_microbatches, num_chunks)
        check(plan)
        assert plan.num_actions == num_devices * num_chunks * num_microbatches
        assert_ascend(plan, list(range(num_microbatches)))


def assert_ascend(plan: Plan, microbatches: list[int]) -> None:
    for row in plan.rows:
        for stage, kind in {(a.stage, a.kind) for a in row}:
            order = [a.microbatch for a in row if (a.stage, a.kind) == (stage, kind)]
            assert order == microbatches


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 4])
def test_slices_ascend_forwards_and_descend_backwards(num_devices: int, num_slices: int) -> None:
    for num_microbatches in (1, 2, num_devices, 2 * num_devices, 4 * num_devices + 1):
        plan = schedules.seq1f1b(num_devices, num_microbatches, num_slices)
        check(plan)
        assert_ascend(plan, [m for m in range(num_microbatches) for _ in range(num_slices)])
        for row in plan.rows:
            slices = {kind: [a.slice for a in row if a.kind is kind] for kind in (Kind.F, Kind.B)}
            assert slices[Kind.F] == list(range(num_slices)) * num_microbatches
            assert slices[Kind.B] == list(range(num_slices))[::-1] * num_microbatches


def test_one_slice_is_one_f_one_b_and_more_than_fit_are_refused() -> None:
    assert schedules.seq1f1b(4, 9, num_slices=1) == schedules.one_f_one_b(4, 9)
    with pytest.raises(ValueError, match="num_slices must be 1 to 256, got 257"):
        schedules.seq1f1b(2, 2, num_slices=257)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_one_chunk_gives_gpipe(num_devices: int) -> None:
    for num_microbatches in (1, 2, 5, 16):
        gpipe = schedules.gpipe(num_devices, num_microbatches)
        assert schedules.breadth_first(num_devices, num_microbatches, num_chunks=1) == gpipe
        assert schedules.forward_only(num_devices, num_microbatches) == gpipe.forward_only()


@pytest.mark.parametrize(("num_devices", "num_slices"), [(4, 1), (4, 2), (4, 4), (8, 3)])
def test_seq1f1bs_warm_up_is_the_papers(num_devices: int, num_slices: int) -> None:
    plan = schedules.seq1f1b(num_devices, 4 * num_devices, num_slices)
    for device, row in enumerate(plan.rows):
        kinds = "".join(action.kind.name for action in row)
        warmup = num_devices - device - 2 + num_slices
        rest = len(row) // 2 - warmup
        assert kinds == "F" * warmup + "FB" * rest + "B" * warmup
