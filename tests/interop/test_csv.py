"""Schedules in files of torch's two formats: here from torch, and in torch from here."""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import pipelining as theirs
from torch.distributed.pipelining import schedules as torch_schedules
from torch.testing._internal.distributed.fake_pg import FakeStore

from pykern.interop import pipelining
from tests.interop.cases import CPU, LOOPED, MULTI, V_SHAPED, batch, close, gradients_of, parts
from tests.interop.cases import loss_fn as loss_of

NUM_RANKS, NUM_STAGES, COUNT = 4, 8, 8
FORMS = ("compute_only", "compute_comms")


@contextmanager
def group(num_ranks: int) -> Iterator[Any]:
    """A process group of this process, in which nobody else is there."""
    if num_ranks == 1:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def in_torch(name: str, world: Any) -> Any:
    """torch's schedule of rank 0."""
    local = (0, NUM_STAGES - 1) if name in V_SHAPED else (0, NUM_RANKS)
    modules = parts(NUM_STAGES)
    stages = [theirs.PipelineStage(modules[s], s, NUM_STAGES, CPU, group=world) for s in local]
    found = torch_schedules.get_schedule_class(name)
    return found(stages, COUNT, loss_fn=loss_of)


def here(name: str, modules: Any, count: int = COUNT, num_ranks: int = NUM_RANKS) -> Any:
    """pykern's, of all ranks, with a worker each."""
    v_shaped = name in V_SHAPED
    stages = []
    for index, module in enumerate(modules):
        rank = index % num_ranks
        if v_shaped and index >= num_ranks:
            rank = 2 * num_ranks - 1 - index
        device = torch.device(f"cpu:{rank}")
        stages.append(pipelining.PipelineStage(module, index, len(modules), device))
    found = getattr(pipelining, name, None) or pipelining.get_schedule_class(name)
    return found(stages, count, loss_fn=loss_of)


def cells(order: dict[int, Any]) -> list[list[str]]:
    """The actions of each rank without bubbles, pairs taken apart."""
    return [
        [str(leaf) for action in row if action for leaf in _leaves(action)]
        for row in order.values()
    ]


def _leaves(action: Any) -> Any:
    return getattr(action, "sub_actions", None) or (action,)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MULTI)
def test_a_file_of_torch_is_read_and_run(name: str, form: Any, tmp_path: Path) -> None:
    # torch takes a file of any name.
    file = tmp_path / "schedule"
    with group(NUM_RANKS) as world:
        torchs = in_torch(name, world)
        torchs._dump_csv(file, format=form)
        expected = cells(torchs.pipeline_order)
    modules, (x, y) = parts(NUM_STAGES), batch(2 * COUNT)
    schedule = here("_PipelineScheduleRuntime", modules) if name in LOOPED else None
    if schedule is None:
        schedule = here(name, modules)
    schedule._load_csv(file, format=form)
    assert cells(schedule.pipeline_order) == expected
    plain = torch.nn.Sequential(*deepcopy(modules))
    loss_of(plain(x), y).backward()
    schedule.step(x, target=y)
    close(gradients_of(modules), gradients_of(list(plain)))


@pytest.mark.parametrize("name", MULTI)
def test_torch_reads_a_file_from_here(name: str, tmp_path: Path) -> None:
    schedule = here(name, parts(NUM_STAGES))
    messages = []
    for form in FORMS:
        schedule._dump_csv(tmp_path / form, format=form)
        with group(NUM_RANKS) as world:
            torchs = in_torch(name, world)
            torchs._load_csv(tmp_path / form, format=form)
            rows = torchs.pipeline_order_with_comms
        computed = {rank: [it for it in row if it.is_compute_op] for rank, row in rows.items()}
        assert cells(computed) == cells(schedule.pipeline_order)
        messages.append(
            [
                {str(it) for it in row if "SEND" in str(it) or "RECV" in str(it)}
                for row in rows.values()
            ]
        )
    # To the form without, torch has added them itself.
    assert messages[0] == messages[1]
    assert all(messages[0])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", LOOPED)
def test_torch_runs_a_file_from_here(name: str, form: Any, tmp_path: Path) -> None:
    file = tmp_path / "schedule.csv"
    x, y = batch()
    modules, others = parts(4), parts(4)
    schedule = here(name, modules, count=4, num_ranks=1)
    schedule._dump_csv(file, format=form)
    schedule.step(x, target=y)
    with group(1):
        stages = [theirs.PipelineStage(it, index, 4, CPU) for index, it in enumerate(others)]
        torchs = torch_schedules._PipelineScheduleRuntime(stages, 4, loss_fn=loss_of)
        torchs._load_csv(str(file), format=form)
        torchs.step(x, target=y)
    close(gradients_of(modules), gradients_of(others))


@pytest.mark.parametrize("name", MULTI)
def test_a_file_from_here_is_read_here(name: str, tmp_path: Path) -> None:
    first, only, again = (tmp_path / each for each in ("first.txt", "only.txt", "again.txt"))
    schedule = here(name, parts(NUM_STAGES))
    schedule._dump_csv(first)
    schedule._dump_csv(only, format="compute_only")
    assert "SEND_F" in first.read_text()
    assert "SEND_F" not in only.read_text()
    other = here(name, parts(NUM_STAGES))
    other._load_csv(only)
    other._dump_csv(again)
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_actions_of_torch_and_of_another_schedule_are_taken(name: str) -> None:
    with group(NUM_RANKS) as world:
        torchs = in_torch(name, world)
        order, with_comms = torchs.pipeline_order, torchs.pipeline_order_with_comms
    schedule = here("_PipelineScheduleRuntime", parts(NUM_STAGES))
    schedule._prepare_schedule_with_comms(order)
    assert cells(schedule.pipeline_order) == cells(order)
    other = here("_PipelineScheduleRuntime", parts(NUM_STAGES))
    other._prepare_schedule_with_comms(with_comms, format="compute_comms")
    assert other.pipeline_order == schedule.pipeline_order
    third = here("_PipelineScheduleRuntime", parts(NUM_STAGES))
    third._prepare_schedule_with_comms(schedule.pipeline_order)
    assert third.pipeline_order == schedule.pipeline_order


def test_what_cannot_be_written_or_taken_is_refused(tmp_path: Path) -> None:
    schedule = here("_PipelineScheduleRuntime", parts(NUM_STAGES))
    file = tmp_path / "schedule.csv"
    with pytest.raises(RuntimeError, match="has no plan yet"):
        schedule._dump_csv(file)
    with pytest.raises(
        ValueError, match="format must be one of 'compute_only' or 'compute_comms', got"
    ):
        here("Interleaved1F1B", parts(NUM_STAGES))._dump_csv(file, format="both")
    assert not file.exists()
    with pytest.raises(
        ValueError,
        match=r"the plan must be for .* stages, .* microbatches and .* ranks, got one for 2, .* "
        r"and .* devices",
    ):
        schedule._prepare_schedule_with_comms({0: ["0F0", "0B0"], 1: ["1F0", None, "1B0"]})
    with pytest.raises(ValueError, match="line 1, cell 1"):
        schedule._prepare_schedule_with_comms({0: ["0X0"]})
    file.write_text("0F0,0B1\n")
    with pytest.raises(ValueError, match=r"schedule\.csv"):
        schedule._load_csv(file)
