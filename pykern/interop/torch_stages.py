"""The stages of torch.distributed.pipelining that fit a plan, and those that cannot run it."""

from __future__ import annotations

from collections.abc import Sequence

from torch._dynamo import OptimizedModule
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.parallel import DistributedDataParallel

from ..plan import Kind, Plan


def require_stages(plan: Plan, stages: Sequence[_PipelineStageBase]) -> None:
    """Refuses stages that are not this process's part of the plan.

    Raises:
        TypeError: one is something else.
        ValueError: they do not fit the plan, or their group does not; or torch's runtime fails on a
            module of theirs.
    """
    for stage in stages:
        if not isinstance(stage, _PipelineStageBase):
            raise TypeError(
                "stages must be torch.distributed.pipelining.PipelineStage or made by "
                f"build_stage, got a {type(stage).__name__}"
            )
        if stage.num_stages != plan.num_stages:
            raise ValueError(
                f"stage {stage.stage_index} must be one of {plan.num_stages}, as in the plan, got "
                f"one of {stage.num_stages}"
            )
        _require_runnable(plan, stage)
    if not stages:
        raise ValueError(
            "stages must hold at least one stage in each process of the group, got an empty list"
        )
    if any(stage.group is not stages[0].group for stage in stages):
        raise ValueError("stages must be made with one group, got stages of different groups")
    rank, size = stages[0].group_rank, stages[0].group_size
    if size != plan.num_devices:
        raise ValueError(
            f"the stages' group must have {plan.num_devices} processes, one for each device of the "
            f"plan, got {size}"
        )
    due = [stage for stage, device in enumerate(plan.placement.replicas[0]) if device == rank]
    given = sorted(stage.stage_index for stage in stages)
    if given != due:
        raise ValueError(
            f"stages must be {due} in process {rank} of the group, which is device {rank} of the "
            f"plan, got {given}"
        )


def _require_runnable(plan: Plan, stage: _PipelineStageBase) -> None:
    """Refuses modules that torch's runtime fails on, or gives no gradients."""
    module, name = stage.submod, f"stage {stage.stage_index}"
    if isinstance(module, FSDPModule):
        raise ValueError(
            f"{name} must not be sharded by fully_shard, got one that is. A plan does not say when "
            "to gather it"
        )
    if not plan.has(Kind.W):
        return
    if isinstance(module, DistributedDataParallel):
        raise ValueError(
            f"{name} must not be in DistributedDataParallel for a plan that splits backwards, got "
            "one that is. Use a plan with B: torch's split backward gives it no gradients"
        )
    if any(isinstance(part, OptimizedModule) for part in module.modules()):
        raise ValueError(
            f"{name} must not be compiled for a plan that splits backwards, got a compiled module. "
            "Use a plan with B: torch splits no backward of compiled modules"
        )
