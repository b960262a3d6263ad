"""One process of torch.distributed.pipelining, which runs the schedules of a job.

`torch_processes` starts it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from ..models import next_token_loss
from .answer import Answer
from .gpt_task import GptTask

# Torch's schedules, each with the stages of a rank.
SCHEDULES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}
# The stages run down the ranks and back up; those of the others go round and round.
_V_SHAPED = "ZBVZeroBubble"
# Two runtimes round otherwise by this share of a loss, or of a gradient's size.
_TOLERANCE = 1e-4


def schedules_of_torch() -> list[str]:
    """The schedules that this torch runs.

    Before 2.13 two neighbouring stages on a rank fail: torch 2.11 begins by a message of the rank
    to itself, which gloo refuses, and the backward of torch 2.12 refuses custom functions.
    """
    return [name for name in SCHEDULES if name != _V_SHAPED or torch.__version__ >= "2.13"]


@dataclass(frozen=True)
class RankJob:
    """The work of one process.

    Attributes:
        task: the step.
        schedules: by torch's names, in their order.
        rank: the number of the process.
        device: its own.
        backend: by which the processes talk.
        num_threads: of an operation on the CPU.
        folder: of the file by which the processes meet.
        answer: the right loss and gradients.
        warmups: the first steps, which are not timed.
        steps: those that are timed.
    """

    task: GptTask
    schedules: Sequence[str]
    rank: int
    device: str
    backend: str
    num_threads: int
    folder: str
    answer: Answer
    warmups: int
    steps: int


class TorchRank:
    """The stages of one rank under one schedule."""

    def __init__(self, job: RankJob, name: str) -> None:
        self._device, task = torch.device(job.device), job.task
        num_stages = SCHEDULES[name] * task.num_devices
        local = list(range(job.rank, num_stages, task.num_devices))
        if name == _V_SHAPED:
            local = [job.rank, num_stages - 1 - job.rank]
        chain, values = task.stages(num_stages), task.values(num_stages)
        self._modules = [chain[stage].to(self._device) for stage in local]
        stages = [
            PipelineStage(
                module,
                stage,
                num_stages,
                self._device,
                input_args=values[stage],
                output_args=values[stage + 1],
            )
            for module, stage in zip(self._modules, local, strict=True)
        ]
        self._schedule = get_schedule_class(name)(
            stages if len(stages) > 1 else stages[0], task.num_microbatches, loss_fn=next_token_loss
        )
        x, y = task.batch()
        self._inputs = (x.to(self._device),) if 0 in local else ()
        self._target = y.to(self._device) if num_stages - 1 in local else None

    def step(self) -> tuple[float | None, int]:
        """The loss, on the rank of the last stage, and the nanoseconds until it is on the host."""
        losses: list[Tensor] | None = None if self._target is None else []
        dist.barrier()
        start = time.perf_counter_ns()
        self._schedule.step(*self._inputs, target=self._target, losses=losses, return_outputs=False)
        loss = None if losses is None else torch.stack(losses).mean().item()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return loss, time.perf_counter_ns() - start

    def require(self, loss: float | None, answer: Answer) -> None:
        """Raises ValueError where the first step has another answer."""
        right, gradients = answer.loss, answer.gradients()
        if loss is not None and not abs(loss - right) <= _TOLERANCE * abs(right):
            raise ValueError(f"the loss must be {right}, got {loss}")
        for module in self._modules:
            for name, parameter in module.named_parameters():
                found, expected = parameter.grad, gradients[name]
                if found is None:
                    raise ValueError(f"{name} must have a gradient, got None")
                error = ((found.cpu() - expected).norm() / expected.norm()).item()
                if not error <= _TOLERANCE:
                    raise ValueError(
                        f"the gradient of {name} must be that of pykern, got one that differs by "
                        f"{error:.1e} of its size"
                    )


def _times_ns(job: RankJob, name: str) -> list[int]:
    """The times of this rank's part of each step."""
    rank = TorchRank(job, name)
    loss, _ = rank.step()
    rank.require(loss, job.answer)
    times = [rank.step()[1] for _ in range(job.warmups - 1 + job.steps)]
    return times[-job.steps :]


def serve(descriptor: int) -> None:
    """Takes a job from a pipe, and sends the times of each schedule, or the text of an error."""
    pipe = Connection(descriptor)
    job: RankJob = pipe.recv()
    torch.set_num_threads(job.num_threads)
    device = torch.device(job.device)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            job.backend,
            init_method=f"file://{job.folder}/store",
            rank=job.rank,
            world_size=job.task.num_devices,
        )
        for name in job.schedules:
            pipe.send(_times_ns(job, name))
    # The process at the other end tells of every error.
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
