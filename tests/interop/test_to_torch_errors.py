"""Plans that torch's runtime cannot run are refused before anything is sent, with the rule."""

import importlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from pykern.interop import torch_runtime
from pykern.parallel.peers.errors import PeerError
from pykern.plan import Action, Costs, Placement, Plan, PlanError, with_recompute
from pykern.schedules import by_name, hanayo, one_f_one_b, zb_h1
from tests import peers
from tests.interop.torch_peers import CPU, loss_of, make_batch, make_model, several, stages_of, step


@pytest.fixture(autouse=True, scope="module")
def _rank_0_of_two() -> Iterator[None]:
    """A group in which nobody else is there: what is refused is so before anyone is asked."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def stage(index: int, num_stages: int = 2, module: Any = None) -> PipelineStage:
    found = nn.Linear(2, 2) if module is None else module
    return PipelineStage(found, index, num_stages, CPU)


REFUSED: dict[str, tuple[Callable[[], Plan], list[int], str]] = {
    "replicas": (
        lambda: by_name["chimera"](2, 2),
        [0],
        "replicas of the plan must be 1 for torch's runtime, got 2",
    ),
    "slices": (
        lambda: by_name["seq1f1b"](2, 2),
        [0],
        "slices of the plan must be 1 for torch's runtime, got",
    ),
    "recompute": (
        lambda: with_recompute(one_f_one_b(2, 2), [Action.parse("0R0")], Costs(1, 2)),
        [0],
        "actions must be F, B, I or W for torch's runtime, got 0R0 at position [0-9]+ of dev",
    ),
    "forwards": (
        lambda: one_f_one_b(2, 2).forward_only(),
        [0],
        "plan must have backwards for torch's runtime, got one without",
    ),
    "none": (
        lambda: one_f_one_b(2, 2),
        [],
        "stages must hold at least one stage in each process of the group, got an empty list",
    ),
    "another's": (
        lambda: one_f_one_b(2, 2),
        [1],
        r"stages must be \[0\] in process 0 of the group, which is device 0 .*, got \[1\]$",
    ),
    "twice": (
        lambda: one_f_one_b(2, 2),
        [0, 0],
        r"stages must be \[0\] in process .* got \[0, 0\]",
    ),
    "too few": (
        lambda: hanayo(2, 2),
        [0],
        "stage 0 must be one of 4, as in the plan, got one of 2",
    ),
    "processes": (
        lambda: by_name["interleaved"](1, 2),
        [0, 1],
        "the stages' group must have 1 processes, one for each device of the plan, got 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    plan, given, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        plan().to_torch([stage(index) for index in given], loss_fn=loss_of)


def test_another_number_of_microbatches_is_refused() -> None:
    with pytest.raises(ValueError, match="n_microbatches must be 2, as in the plan, got 3"):
        one_f_one_b(2, 2).to_torch([stage(0)], 3, loss_of)


def test_what_is_no_stage_or_no_plan_is_refused() -> None:
    with pytest.raises(TypeError, match="made by build_stage, got a Linear"):
        one_f_one_b(2, 2).to_torch([nn.Linear(2, 2)], loss_fn=loss_of)  # type: ignore[list-item]
    rows = [[Action.parse("0F0"), Action.parse("0B0")], [Action.parse("1F0")]]
    with pytest.raises(PlanError):
        Plan(Placement.linear(2), 1, rows).to_torch([stage(0)])


def test_stages_of_several_groups_are_refused() -> None:
    stages = [stage(0, 4), stage(3, 4)]
    stages[1].group = dist.new_group([0, 1])
    with pytest.raises(
        ValueError, match="stages must be made with one group, got stages of different groups"
    ):
        hanayo(2, 2).to_torch(stages, loss_fn=loss_of)


def test_modules_that_torch_cannot_split_are_refused() -> None:
    compiled: Any = torch.compile(nn.Linear(2, 2), backend="eager")
    replicated = DistributedDataParallel(nn.Linear(2, 2))
    for module, message in (
        (compiled, "compiled"),
        (replicated, "in DistributedDataParallel"),
    ):
        with pytest.raises(ValueError, match=f"stage 0 must not be {message} .* Use a plan with B"):
            zb_h1(2, 2).to_torch([stage(0, module=module)], loss_fn=loss_of)
        one_f_one_b(2, 2).to_torch([stage(0, module=module)], loss_fn=loss_of)
    sharded = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(
        ValueError, match="stage 0 must not be sharded by fully_shard, got one that is"
    ):
        one_f_one_b(2, 2).to_torch([stage(0, module=sharded)], loss_fn=loss_of)


def test_a_step_without_target_or_of_uneven_microbatches_is_refused() -> None:
    schedule = hanayo(2, 2).to_torch([stage(0, 4), stage(3, 4)], loss_fn=loss_of)
    with pytest.raises(
        ValueError, match="target must be given to step in the process of the last stage, got None"
    ):
        schedule.step(torch.ones(4, 2))
    message = r"inputs of microbatch 1 must have shapes \[\(2, 2\)\], .* got \[\(1, 2\)\]"
    with pytest.raises(ValueError, match=message):
        schedule.step(torch.ones(3, 2), target=torch.ones(3, 2))


def test_another_torch_is_refused_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    message = rf"torch must be 2.13 to 2.15 .* got {re.escape(torch.__version__)}"
    with monkeypatch.context() as patch:
        patch.setattr(torch_runtime, "_USED", ("_step_microbatches", "_gone"))
        with pytest.raises(ImportError, match=f"{message}.* has no _gone"):
            one_f_one_b(2, 2).to_torch([stage(0)])
    monkeypatch.delattr(schedules, "_Action")
    with pytest.raises(ImportError, match=message):
        importlib.reload(torch_runtime)


def differ(rank: int) -> list[str]:
    """The errors of two processes with different plans, or different scaling."""
    told = []
    for plans, scales in (
        ((hanayo(2, 4), hanayo(2, 4, optimised=True)), (True, True)),
        ((hanayo(2, 4), hanayo(2, 4)), (True, False)),
    ):
        plan = plans[rank]
        stages = stages_of(rank, plan, make_model(plan.num_stages))
        schedule = plan.to_torch(stages, loss_fn=loss_of, scale_grads=scales[rank])
        with pytest.raises(PeerError) as raised:
            step(schedule, make_batch(4))
        told.append(str(raised.value))
    return told


def shrink(rank: int) -> str:
    """A second batch that is smaller; the other process has been asked for no second step."""
    plan = hanayo(2, 4)
    schedule = plan.to_torch(stages_of(rank, plan, make_model(4)), loss_fn=loss_of)
    step(schedule, make_batch(4))
    if rank == 0:
        batch, target = make_batch(4)
        with pytest.raises(
            ValueError,
            match=r"inputs of microbatch .* must have shapes .*, as in the first microbatch, got",
        ) as raised:
            step(schedule, (batch[:4], target[:4]))
        return str(raised.value)
    return ""


def test_processes_with_other_plans_are_told_so_and_smaller_batches_are_refused() -> None:
    results = peers.run(2, several, [(differ,), (shrink,)])
    plans, scales = results[0][0]
    assert results[1][0] == [plans, scales]
    start = "pipelines must be alike in all processes of the group, got ones that differ in "
    assert plans.startswith(f"{start}the plan: the plan is 4 microbatches of 4 stages on 2 devices")
    assert scales.startswith(f"{start}scale_grads: scale_grads is True in process 0 and False in")
    message = results[0][1]
    assert message.startswith("inputs of microbatch 0 must have shapes [(")
    assert ", as in the first microbatch, got [(1, 6)]" in message
