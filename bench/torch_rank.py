"""One rank of torch.distributed.pipelining as a process of its own, driven over a pipe.

Run as a script by torch_peers, which it does not import. Between commands it sleeps in a read.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from pykern.plan import Plan

# Schedules whose stages run down the ranks and back up; the others deal them round and round.
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")

_CPU = torch.device("cpu")


class Rank:
    """The schedules of one rank, each with its own copy of the stages.

    Args:
        rank: 0 to `num_ranks` - 1.
        chains: The whole model as a list of stages, by name of what cuts it so: "torch " and the
            name of a schedule, or a plan's.
        plans: By name, and whether torch is to add sends and receives itself.
        batch: The input of stage 0, and what the loss function compares the last output with.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what a job says
        self,
        rank: int,
        num_ranks: int,
        chains: dict[str, list[nn.Module]],
        plans: dict[str, tuple[Plan, bool]],
        num_microbatches: int,
        batch: tuple[Tensor, Tensor],
        loss_fn: Callable[..., Tensor],
    ) -> None:
        self.ids, self.target = batch
        self.schedules: dict[str, Any] = {}
        self.stages: dict[str, dict[int, nn.Module]] = {}
        self.num_stages = {name: len(chain) for name, chain in chains.items()}
        example = self.ids.chunk(num_microbatches)[0]
        for name, chain in chains.items():
            plan, by_torch = plans.get(name, (None, False))
            if plan is None:
                local = _local_stages(name, rank, num_ranks, len(chain))
            else:
                placed = enumerate(plan.placement.replicas[0])
                local = [stage for stage, device in placed if device == rank]
            stages = _make_stages(chain, local, example)
            if plan is None:
                make = get_schedule_class(name.removeprefix("torch "))
                first_argument = stages if len(stages) > 1 else stages[0]
                schedule = make(first_argument, num_microbatches, loss_fn=loss_fn)
            elif by_torch:
                schedule = _lowered_by_torch(plan, stages, loss_fn)
            else:
                schedule = plan.to_torch(stages, num_microbatches, loss_fn)
            self.schedules[name] = schedule
            self.stages[name] = {index: chain[index] for index in local}

    def prepare(self, name: str) -> None:
        """Clears the gradients."""
        for stage in self.stages[name].values():
            stage.zero_grad()

    def step(self, name: str) -> float | None:
        """Forward and backward of the whole batch; the loss, on the rank of the last stage."""
        local = self.stages[name]
        losses: list[Tensor] = []
        is_last = self.num_stages[name] - 1 in local
        self.schedules[name].step(
            *((self.ids,) if 0 in local else ()),
            target=self.target if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        return torch.stack(losses).mean().item() if is_last else None

    def gradients(self, name: str) -> dict[str, Tensor]:
        """The gradients of this rank's stages, by the parameters' names in the model."""
        return {
            key: value.grad
            for stage in self.stages[name].values()
            for key, value in stage.named_parameters()
            if value.grad is not None
        }


def _local_stages(name: str, rank: int, num_ranks: int, num_stages: int) -> list[int]:
    if name.removeprefix("torch ") in _V_SHAPED:
        return [rank, num_stages - 1 - rank]
    return list(range(rank, num_stages, num_ranks))


def _make_stages(chain: list[nn.Module], local: list[int], example: Tensor) -> list[PipelineStage]:
    """With static metadata, which spares torch a dry run and the inference of shapes."""
    values = [example]
    with torch.no_grad():
        for module in chain:
            values.append(module(values[-1]))
    for value in values[1:]:
        value.requires_grad_()
    return [
        PipelineStage(
            chain[index],
            index,
            len(chain),
            _CPU,
            input_args=values[index],
            output_args=values[index + 1],
        )
        for index in local
    ]


def _lowered_by_torch(
    plan: Plan, stages: list[Any], loss_fn: Callable[..., Tensor]
) -> _PipelineScheduleRuntime:
    """The plan's actions with the sends and receives that torch adds to them."""
    schedule = _PipelineScheduleRuntime(stages, plan.num_microbatches, loss_fn=loss_fn)
    rows = [[_Action.from_str(str(action)) for action in row] for row in plan.rows]
    schedule._prepare_schedule_with_comms(dict(enumerate(rows)))
    return schedule


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    job = pickle.loads(pipe.recv_bytes())
    os.sched_setaffinity(0, job.pop("cores"))
    store = FileStore(job.pop("store"), job["num_ranks"])
    dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=job["num_ranks"])
    rank = Rank(**job)
    pipe.send_bytes(pickle.dumps(None))
    while True:
        try:
            method, name = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the benchmark is gone
            return
        pipe.send_bytes(pickle.dumps(getattr(rank, method)(name)))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
