"""Processes of torch.distributed.pipelining as contenders of a benchmark."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pykern.models import gpt, next_token_loss
from pykern.partition import partition
from pykern.partition.profile import layer_times_ns
from pykern.plan import Plan

from .harness import Contender


@dataclass(frozen=True)
class Task:
    """The work of every contender: the gradients of one batch, cut into microbatches."""

    model: nn.Sequential
    ids: Tensor
    target: Tensor
    num_microbatches: int

    def cut(self, num_stages: int) -> list[int]:
        """Layers per stage, the same for all contenders with that many stages."""
        return [len(stage) for stage in partition(self.model, num_stages).stages]

    def stages(self, num_stages: int) -> list[nn.Module]:
        """A copy of the model, cut; the parameters keep their names."""
        model, counts = copy.deepcopy(self.model), self.cut(num_stages)
        return [
            model[sum(counts[:stage]) : sum(counts[: stage + 1])] for stage in range(num_stages)
        ]

    def balance(self, num_stages: int) -> str:
        """The share of each stage in the time of all layers, measured."""
        sample = self.ids.chunk(self.num_microbatches)[0]
        times = iter(layer_times_ns(list(self.model), sample))
        stages = [sum(next(times) for _ in range(count)) for count in self.cut(num_stages)]
        return "/".join(f"{time / sum(stages):.0%}" for time in stages)


def small_gpt(layers: int, width: int, seq: int, batch: int) -> Task:
    ids = torch.randint(256, (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    return Task(
        model=gpt(vocab=256, layers=layers, width=width, context=seq),
        ids=ids[:, :-1].contiguous(),
        target=ids[:, 1:].contiguous(),
        num_microbatches=8,
    )


@dataclass(frozen=True)
class PlanOnTorch:
    """A plan for torch's runtime.

    Attributes:
        by_torch: Whether torch adds sends and receives itself.
    """

    plan: Plan
    by_torch: bool = False


class _TorchRanks:
    """The two processes of torch.distributed.pipelining, as seen from this one."""

    def __init__(self, pipes: list[Connection], num_stages: Mapping[str, int]) -> None:
        self._pipes = pipes
        self._num_stages = num_stages

    def ask(self, method: str, schedule: str) -> list[Any]:
        """Has all ranks do the same at the same time; their replies."""
        command = pickle.dumps((method, schedule))
        for pipe in self._pipes:
            pipe.send_bytes(command)
        return self.replies()

    def replies(self) -> list[Any]:
        return [pickle.loads(pipe.recv_bytes()) for pipe in self._pipes]

    def contender(self, schedule: str) -> Contender:
        def step() -> float:
            losses: list[float | None] = self.ask("step", schedule)
            return next(loss for loss in losses if loss is not None)

        def gradients() -> Mapping[str, Tensor]:
            parts: list[dict[str, Tensor]] = self.ask("gradients", schedule)
            return dict(ChainMap(*parts))

        return Contender(
            name=f"{schedule}, {self._num_stages[schedule]} stages",
            step=step,
            gradients=gradients,
            prepare=lambda: self.ask("prepare", schedule),
        )


@contextmanager
def torch_peers(
    task: Task,
    num_processes: int,
    folder: Path,
    schedules: Mapping[str, int],
    plans: Mapping[str, PlanOnTorch] | None = None,
) -> Iterator[list[Contender]]:
    """Starts the processes, one core and one thread each, and ends them: they hold no values.

    Args:
        task: The work of all contenders.
        num_processes: As many as devices.
        folder: For a file of their own.
        schedules: Torch's, by name, with the number of stages that each cuts the model into.
        plans: By the name that they go by.
    """
    plans = plans or {}
    num_stages = {f"torch {name}": count for name, count in schedules.items()}
    num_stages |= {name: one.plan.num_stages for name, one in plans.items()}
    chains = {name: task.stages(count) for name, count in num_stages.items()}
    cores = sorted(os.sched_getaffinity(0))
    pipes, processes = [], []
    try:
        for rank in range(num_processes):
            pipe, process = _start_rank()
            pipes.append(pipe)
            processes.append(process)
            job = {
                "rank": rank,
                "num_ranks": num_processes,
                "cores": {cores[rank % len(cores)]},
                "store": str(folder / "store"),
                "chains": chains,
                "plans": {name: (one.plan, one.by_torch) for name, one in plans.items()},
                "num_microbatches": task.num_microbatches,
                "batch": (task.ids, task.target),
                "loss_fn": next_token_loss,
            }
            pipe.send_bytes(pickle.dumps(job))
        ranks = _TorchRanks(pipes, num_stages)
        ranks.replies()
        yield [ranks.contender(name) for name in num_stages]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start_rank() -> tuple[Connection, subprocess.Popen[bytes]]:
    """A process that waits for its job. gloo is kept on the loopback device."""
    here, there = Pipe()
    script = Path(__file__).with_name("torch_rank.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(there.fileno())],
        pass_fds=[there.fileno()],
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    there.close()
    return here, process
