"""Claim: a small GPT trains at least as fast as with torch.distributed.pipelining on two cores.

Forward and backward, no optimizer. Baseline: the best of torch's schedules, in two gloo processes.
The unpipelined model on one and on two threads tells what pipelining is worth here at all.
"""

from __future__ import annotations

import copy
import os
import pickle
import statistics
import subprocess
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern.models import gpt, next_token_loss
from pykern.partition import partition
from pykern.profile import layer_times_ns

from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge

_NUM_DEVICES = 2

# Schedules, each with the number of stages that it cuts the model into.
_PYKERN = {
    "gpipe": 2,
    "one_f_one_b": 2,
    "zb_h1": 2,
    "interleaved": 4,
    "hanayo": 4,
    "interleaved_zb": 4,
    "zb_v": 4,
}
_TORCH = {
    "GPipe": 2,
    "1F1B": 2,
    "Interleaved1F1B": 4,
    "InterleavedZeroBubble": 4,
    "ZBVZeroBubble": 4,
    "DualPipeV": 4,
}

# Threads of a contender with two of them spin for some milliseconds after their last work.
_SETTLE_S = 0.02


@dataclass(frozen=True)
class Task:
    """What every contender computes: the gradients of one batch, cut into microbatches."""

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


@pytest.mark.timeout(900)
def test_pipeline(
    benchmark: BenchmarkFixture,
    smoke: bool,
    report: Callable[[list[Record]], None],
    tmp_path: Path,
) -> None:
    """Tokens per second of every contender."""
    task = _task(layers=2, width=16, seq=8, batch=8) if smoke else _task(4, 256, 128, 16)
    torch.set_num_threads(1)
    case = f"small GPT, 2 stages {task.balance(2)}, 4 stages {task.balance(4)} of the time"
    with _torch_ranks(task, tmp_path) as torch_contenders:
        contenders = [
            _plain(task, threads=1, parts=task.num_microbatches),
            _plain(task, threads=1, parts=1),
            _plain(task, threads=2, parts=task.num_microbatches),
            _plain(task, threads=2, parts=1),
            *(_pykern(task, schedule) for schedule in _PYKERN),
            *torch_contenders,
        ]
        assert_same_answer(contenders)
        samples = interleave(benchmark, contenders, 1 if smoke else 15, settle_s=_SETTLE_S)
    if smoke:
        return
    names = [contender.name for contender in torch_contenders]
    best = min(names, key=lambda name: statistics.median(samples[name]))

    def figures(median_ms: float, best_ms: float) -> dict[str, float]:
        return {"tokens/s": task.ids.numel() / median_ms * 1e3, "speed-up": best_ms / median_ms}

    report(judge("pipeline", case, samples, baseline=best, figures=figures))


def _task(layers: int, width: int, seq: int, batch: int) -> Task:
    ids = torch.randint(256, (batch, seq + 1), generator=torch.Generator().manual_seed(0))
    return Task(
        model=gpt(vocab=256, layers=layers, width=width, context=seq),
        ids=ids[:, :-1].contiguous(),
        target=ids[:, 1:].contiguous(),
        num_microbatches=8,
    )


def _plain(task: Task, threads: int, parts: int) -> Contender:
    """The model without a pipeline: whole batch, or microbatch by microbatch."""
    model = copy.deepcopy(task.model)
    share = torch.tensor(1 / parts)

    def step() -> Tensor:
        total = torch.zeros(())
        for ids, target in zip(task.ids.chunk(parts), task.target.chunk(parts), strict=True):
            loss = next_token_loss(model(ids), target)
            loss.backward(share)
            total += loss.detach()
        return total * share

    cut = "whole batch" if parts == 1 else f"{parts} microbatches"
    name = f"plain model, {threads} thread{'s' * (threads > 1)}, {cut}"
    return in_this_process(name, model, threads, step)


def _pykern(task: Task, schedule: str) -> Contender:
    """Two workers. They share the caller's two threads out, so that each has one."""
    model, num_stages = copy.deepcopy(task.model), _PYKERN[schedule]
    pipe = pykern.Pipeline(
        model,
        devices=f"cpu:{_NUM_DEVICES}",
        schedule=schedule,
        microbatches=task.num_microbatches,
        loss_fn=next_token_loss,
        balance=task.cut(num_stages),
    )
    return in_this_process(
        f"pykern {schedule}, {num_stages} stages",
        model,
        _NUM_DEVICES,
        lambda: pipe.step(task.ids, target=task.target),
    )


class _TorchRanks:
    """The two processes of torch.distributed.pipelining, as seen from this one."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

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
            name=f"torch {schedule}, {_TORCH[schedule]} stages",
            step=step,
            gradients=gradients,
            prepare=lambda: self.ask("prepare", schedule),
        )


@contextmanager
def _torch_ranks(task: Task, folder: Path) -> Iterator[list[Contender]]:
    """Starts the ranks, one core and one thread each, and ends them: they hold nothing of value."""
    chains = {name: task.stages(num_stages) for name, num_stages in _TORCH.items()}
    cores = sorted(os.sched_getaffinity(0))
    pipes, processes = [], []
    try:
        for rank in range(_NUM_DEVICES):
            pipe, process = _start_rank()
            pipes.append(pipe)
            processes.append(process)
            job = {
                "rank": rank,
                "num_ranks": _NUM_DEVICES,
                "cores": {cores[rank % len(cores)]},
                "store": str(folder / "store"),
                "chains": chains,
                "num_microbatches": task.num_microbatches,
                "batch": (task.ids, task.target),
                "loss_fn": next_token_loss,
            }
            pipe.send_bytes(pickle.dumps(job))
        ranks = _TorchRanks(pipes)
        ranks.replies()
        yield [ranks.contender(name) for name in _TORCH]
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
