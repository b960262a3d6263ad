"""The orders of torch.distributed.pipelining, where it has the same schedule."""

from collections.abc import Iterator
from typing import Any

import pytest

from pykern import schedules
from pykern.plan import Plan

torch = pytest.importorskip("torch")
pipelining = pytest.importorskip("torch.distributed.pipelining")

NUM_DEVICES = 4


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """A process group of four in which nobody is there: enough to have torch make its plans."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    distributed = torch.distributed
    distributed.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=NUM_DEVICES)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def torch_rows(schedule: Any) -> list[list[str]]:
    """Forwards and backwards of every rank, without bubbles and gradient reduction."""
    rows = [schedule.pipeline_order[rank] for rank in range(NUM_DEVICES)]
    return [[str(a) for a in row if a is not None and "REDUCE" not in str(a)] for row in rows]


def our_rows(plan: Plan) -> list[list[str]]:
    return [[str(action) for action in row] for row in plan.rows]


def stage(index: int, num_stages: int, group: Any) -> Any:
    module = torch.nn.Linear(1, 1)
    return pipelining.PipelineStage(module, index, num_stages, torch.device("cpu"), group=group)


def loss(output: Any, target: Any) -> Any:
    return (output - target).sum()


@pytest.mark.parametrize("num_microbatches", [1, 3, 4, 8, 9])
def test_gpipe(group: Any, num_microbatches: int) -> None:
    theirs = pipelining.ScheduleGPipe(stage(0, 4, group), num_microbatches, loss_fn=loss)
    assert our_rows(schedules.gpipe(NUM_DEVICES, num_microbatches)) == torch_rows(theirs)


@pytest.mark.parametrize("num_microbatches", [4, 5, 8, 13])
def test_one_f_one_b(group: Any, num_microbatches: int) -> None:
    theirs = torch_rows(pipelining.Schedule1F1B(stage(0, 4, group), num_microbatches, loss_fn=loss))
    ours = our_rows(schedules.one_f_one_b(NUM_DEVICES, num_microbatches))
    assert ours[:-1] == theirs[:-1]
    # torch's table counts the last rank's forwards from 1 although it runs them from 0.
    assert ours[-1][::2] == [f"3F{m}" for m in range(num_microbatches)]
    assert ours[-1][1::2] == theirs[-1][1::2]


@pytest.mark.parametrize("num_chunks", [2, 3])
@pytest.mark.parametrize("num_microbatches", [2, 4, 5, 6, 7, 8, 10, 12, 15])
def test_interleaved(group: Any, num_microbatches: int, num_chunks: int) -> None:
    num_stages = num_chunks * NUM_DEVICES
    stages = [stage(index, num_stages, group) for index in range(0, num_stages, NUM_DEVICES)]
    theirs = pipelining.ScheduleInterleaved1F1B(stages, num_microbatches, loss_fn=loss)
    ours = schedules.interleaved(NUM_DEVICES, num_microbatches, num_chunks)
    assert our_rows(ours) == torch_rows(theirs)


def torch_cells(schedule: type[Any], num_devices: int, **attributes: Any) -> list[list[str]]:
    """Torch's row for each rank, without the group and the stages that a whole object needs."""
    bare = object.__new__(schedule)
    vars(bare).update(pp_group_size=num_devices, **attributes)
    rows = []
    for rank in range(num_devices):
        actions = [a for a in bare._calculate_single_rank_operations(rank) if a is not None]
        rows.append(["&".join(str(part) for part in a.sub_actions or [a]) for a in actions])
    return rows


def our_cells(plan: Plan) -> list[list[str]]:
    """The rows, with the actions of an overlapped pair in one."""
    rows = []
    for row, pairs in zip(our_rows(plan), plan.overlaps, strict=True):
        for start in reversed(pairs):
            row[start : start + 2] = [f"{row[start]}&{row[start + 1]}"]
        rows.append(row)
    return rows


INTERLEAVED = {
    pipelining.ScheduleInterleaved1F1B: schedules.interleaved,
    pipelining.ScheduleInterleavedZeroBubble: schedules.interleaved_zb,
}


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_chunks", [1, 2, 3])
@pytest.mark.parametrize("schedule", INTERLEAVED)
def test_interleaved_on_any_devices(schedule: type[Any], num_devices: int, num_chunks: int) -> None:
    for num_microbatches in range(1, 4 * num_devices + 1):
        rounds = max(1, num_microbatches // num_devices)
        if num_microbatches % rounds:
            continue  # torch refuses these
        theirs = torch_cells(
            schedule,
            num_devices,
            n_local_stages=num_chunks,
            microbatches_per_round=num_microbatches // rounds,
            _n_microbatches=num_microbatches,
        )
        assert our_cells(INTERLEAVED[schedule](num_devices, num_microbatches, num_chunks)) == theirs


def test_zb_h1_is_interleaved_zero_bubble_of_one_chunk() -> None:
    for num_devices, num_microbatches in [(1, 3), (3, 2), (4, 4), (4, 9), (8, 24)]:
        ours = schedules.zb_h1(num_devices, num_microbatches)
        assert ours == schedules.interleaved_zb(num_devices, num_microbatches, num_chunks=1)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_zb_v(num_devices: int) -> None:
    for num_microbatches in range(1, 4 * num_devices + 2):
        theirs = torch_cells(
            pipelining.ScheduleZBVZeroBubble,
            num_devices,
            num_stages=2 * num_devices,
            _n_microbatches=num_microbatches,
        )
        assert our_cells(schedules.zb_v(num_devices, num_microbatches)) == theirs


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 5, 8])
def test_dualpipe_v(num_devices: int) -> None:
    for num_microbatches in range(2 * num_devices, 5 * num_devices + 2):
        theirs = torch_cells(
            pipelining.ScheduleDualPipeV, num_devices, _n_microbatches=num_microbatches
        )
        assert our_cells(schedules.dualpipe_v(num_devices, num_microbatches)) == theirs
