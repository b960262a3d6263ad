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
                "stages are torch.distributed.pipelining.PipelineStage or made by build_stage, "
                f"got a {type(stage).__name__}"
            )
        if stage.num_stages != plan.num_stages:
            raise ValueError(
                f"stage {stage.stage_index} is one of {stage.num_stages}, and the plan has "
                f"{plan.num_stages}"
            )
        _require_runnable(plan, stage)
    if not stages:
        raise ValueError("stages is empty: every process of the group has stages of its own")
    if any(stage.group is not stages[0].group for stage in stages):
        raise ValueError("stages have been made with different groups")
    rank, size = stages[0].group_rank, stages[0].group_size
    if size != plan.num_devices:
        raise ValueError(
            f"the plan is for {plan.num_devices} devices, and the stages' group has {size} "
            f"process{'es' * (size > 1)}"
        )
    due = [stage for stage, device in enumerate(plan.placement.replicas[0]) if device == rank]
    given = sorted(stage.stage_index for stage in stages)
    if given != due:
        raise ValueError(
            f"process {rank} of the group is device {rank}, which has stages {due} of the plan, "
            f"and is given {given}"
        )


def _require_runnable(plan: Plan, stage: _PipelineStageBase) -> None:
    """Refuses modules that torch's runtime fails on, or gives no gradients."""
    module, name = stage.submod, f"stage {stage.stage_index}"
    if isinstance(module, FSDPModule):
        raise ValueError(f"{name} is sharded by fully_shard, and a plan says not when to gather it")
    if not plan.has(Kind.W):
        return
    if isinstance(module, DistributedDataParallel):
        raise ValueError(
            f"{name} is in DistributedDataParallel, which sees no gradients of torch's split "
            "backward, and the plan splits it: use a plan with B"
        )
    if any(isinstance(part, OptimizedModule) for part in module.modules()):
        raise ValueError(
            f"{name} is compiled, and torch splits no backward of compiled modules: use a plan "
            "with B"
        )
