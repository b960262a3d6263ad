"""Runners of a chain of layers in this process: the plain loop, torch's runtime, older pipelines.

On CPU or GPU. Older pipelines are torchgpipe (Kim et al. 2020) and its descendant in fairscale.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _PipelineStageBase

from pykern.partition import partition
from pykern.plan import Action, Kind, Placement, Plan

from .harness import Contender, in_this_process


@dataclass(frozen=True)
class Task:
    """The work of every contender: the gradients of one batch, cut into microbatches.

    Attributes:
        inputs: Input of the first layer; the model is run where they and the target are.
        num_microbatches: A divisor of the rows.
        loss_fn: A mean over rows.
    """

    model: nn.Sequential
    inputs: Tensor
    target: Tensor
    num_microbatches: int
    loss_fn: Callable[[Tensor, Tensor], Tensor]

    def fresh(self) -> nn.Sequential:
        """A copy of the model where the batch is."""
        return copy.deepcopy(self.model).to(self.inputs.device)

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """The microbatches."""
        count = self.num_microbatches
        return list(zip(self.inputs.chunk(count), self.target.chunk(count), strict=True))

    def cut(self, num_stages: int) -> list[int]:
        """Layers per stage, the same for all contenders."""
        return [len(stage) for stage in partition(self.model, num_stages).stages]


@contextmanager
def process_group() -> Iterator[None]:
    """A group of this process alone: torch's stages refuse to be made without one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def plain(task: Task) -> Contender:
    """The model itself, microbatch by microbatch."""
    model = task.fresh()

    def step() -> Tensor:
        total = torch.zeros((), device=task.inputs.device)
        for inputs, target in task.parts():
            loss = task.loss_fn(model(inputs), target) / task.num_microbatches
            loss.backward()
            total += loss.detach()
        return total

    return in_this_process("plain loop", model, 1, step)


def torch_runtime(task: Task, num_stages: int) -> Contender:
    """All stages in this process, with static metadata, which spares it the inference of shapes."""
    model, device = task.fresh(), task.inputs.device
    chain = _stages(model, task.cut(num_stages))
    values = [task.parts()[0][0]]
    with torch.no_grad():
        for module in chain:
            values.append(module(values[-1]))
    for value in values[1:]:
        value.requires_grad_()
    stages: list[_PipelineStageBase] = [
        PipelineStage(
            module,
            index,
            num_stages,
            device,
            input_args=values[index],
            output_args=values[index + 1],
        )
        for index, module in enumerate(chain)
    ]
    schedule = ScheduleInterleaved1F1B(stages, task.num_microbatches, loss_fn=task.loss_fn)

    def step() -> Tensor:
        losses: list[Tensor] = []
        schedule.step(task.inputs, target=task.target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean()

    return in_this_process("torch runtime, 1 process", model, 1, step)


def torchgpipe(task: Task, num_stages: int) -> Contender:
    """GPipe of torchgpipe, without recomputing."""
    return _older("torchgpipe", "torchgpipe", "GPipe", task, num_stages)


def fairscale(task: Task, num_stages: int) -> Contender:
    """Pipe of fairscale, without recomputing."""
    return _older("fairscale Pipe", "fairscale.nn", "Pipe", task, num_stages)


def _older(name: str, module: str, made_by: str, task: Task, num_stages: int) -> Contender:
    """Raises ImportError where the package is not installed."""
    model = task.fresh()
    with warnings.catch_warnings():
        # They say of themselves that they are deprecated.
        warnings.simplefilter("ignore")
        pipe = getattr(importlib.import_module(module), made_by)(
            model,
            balance=task.cut(num_stages),
            devices=[task.inputs.device] * num_stages,
            chunks=task.num_microbatches,
            checkpoint="never",
        )

    def step() -> Tensor:
        loss = task.loss_fn(pipe(task.inputs), task.target)
        loss.backward()
        return loss.detach()

    return in_this_process(name, model, 1, step)


def _stages(model: nn.Sequential, counts: list[int]) -> list[nn.Module]:
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [model[start : start + count] for start, count in zip(starts, counts, strict=True)]


def loop_order(num_stages: int, num_microbatches: int) -> Plan:
    """One worker takes a microbatch through all stages and back before the next."""
    stages = range(num_stages)
    row = [
        Action(kind, stage, microbatch)
        for microbatch in range(num_microbatches)
        for kind, order in ((Kind.F, stages), (Kind.B, reversed(stages)))
        for stage in order
    ]
    return Plan(Placement(1, [0] * num_stages), num_microbatches, [row])
