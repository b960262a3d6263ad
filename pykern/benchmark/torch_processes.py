"""Steps of torch.distributed.pipelining, which has a process for each device."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from ..models import next_token_loss
from ..pipeline.pipeline import Pipeline
from ..runtime.devices import DeviceLane, parse_devices
from .answer import Answer
from .figures import CannotRunHere
from .gpt_task import GptTask
from .torch_rank import RankJob, schedules_of_torch, serve

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# Processes have to start, to meet, and to run all steps of a schedule. On workers all of them have
# to be over soon after the time of a run is.
_LIMITS_S = {"cpu": 50.0, "cuda": 180.0}


def torch_steps(
    task: GptTask, devices: str, warmups: int, steps: int
) -> Iterator[tuple[str, list[int]]]:
    """Each schedule of torch with the times of its steps in nanoseconds, that of the slowest rank.

    Raises:
        CannotRunHere: torch.distributed.pipelining cannot run on these devices.
        RuntimeError: a process has failed, or its gradients are not those of a `Pipeline`.
    """
    lanes = parse_devices(devices)
    _refuse(lanes)
    backend = _BACKENDS[lanes[0].device.type]
    schedules = schedules_of_torch()
    with ExitStack() as undo:
        folder = undo.enter_context(TemporaryDirectory())
        answer = _answer(task, devices, Path(folder))
        pipes = []
        for rank, lane in enumerate(lanes):
            job = RankJob(
                task=task,
                schedules=schedules,
                rank=rank,
                device=str(lane.device),
                backend=backend,
                # As many as a worker of a `Pipeline` has.
                num_threads=max(1, torch.get_num_threads() // len(lanes)),
                folder=folder,
                answer=answer,
                warmups=warmups,
                steps=steps,
            )
            pipes.append(_start(job, undo))
        limit_s = _LIMITS_S[lanes[0].device.type]
        for name in schedules:
            replies = _replies(name, pipes, limit_s)
            yield name, [max(times) for times in zip(*replies, strict=True)]


def _refuse(lanes: Sequence[DeviceLane]) -> None:
    kind = lanes[0].device.type
    backend = _BACKENDS[kind]
    if len(lanes) < 2:
        raise CannotRunHere(
            "devices must be two or more for torch.distributed.pipelining, whose processes send "
            f"to each other, got {len(lanes)}"
        )
    if not dist.is_backend_available(backend):
        raise CannotRunHere(
            f"torch must have {backend}, by which processes on {kind} devices talk, got "
            f"{torch.__version__}, built without it"
        )
    if kind == "cuda" and len({lane.device for lane in lanes}) < len(lanes):
        raise CannotRunHere(
            "devices must be a whole GPU for each process of torch.distributed.pipelining, got "
            "several lanes of one GPU"
        )


def _answer(task: GptTask, devices: str, folder: Path) -> Answer:
    """The loss and the gradients of a step of a `Pipeline`."""
    model, (x, y) = task.model(), task.batch()
    with Pipeline(
        model,
        devices=devices,
        schedule="gpipe",
        microbatches=task.num_microbatches,
        loss_fn=next_token_loss,
    ) as pipe:
        loss = pipe.step(x, target=y).item()
    gradients = {
        name: each.grad for name, each in model.named_parameters() if each.grad is not None
    }
    answer = Answer.written(loss, gradients, folder / "gradients")
    del model, pipe, gradients
    if torch.cuda.is_initialized():
        # The processes need the memory.
        gc.collect()
        torch.cuda.empty_cache()
    return answer


def _start(job: RankJob, undo: ExitStack) -> Connection:
    """Starts a process, which `undo` ends."""
    here, there = Pipe()
    undo.callback(here.close)
    program = f"from {serve.__module__} import serve; serve({there.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        pass_fds=[there.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C is for this process, which ends the others.
        start_new_session=True,
    )
    undo.callback(process.wait)
    undo.callback(process.kill)
    there.close()
    here.send(job)
    return here


def _replies(name: str, pipes: Sequence[Connection], limit_s: float) -> list[list[int]]:
    """The times of each rank under a schedule; one limit is for all of them."""
    times, missing = [], list(pipes)
    until = time.monotonic() + limit_s
    while missing:
        ready = wait(missing, max(0.0, until - time.monotonic()))
        if not ready:
            raise RuntimeError(
                f"torch's {name} has not ended within {limit_s:.0f} s. Run it with torchrun, and "
                "look for a rank that waits"
            )
        for pipe in pipes:
            if pipe in ready:
                missing.remove(pipe)
                times.append(_reply(name, pipes.index(pipe), pipe))
    return times


def _reply(name: str, rank: int, pipe: Connection) -> list[int]:
    try:
        reply: list[int] | str = pipe.recv()
    except (EOFError, OSError) as error:
        raise RuntimeError(
            f"rank {rank} of torch's {name} has ended. Look into the log of the system for a "
            "process without memory"
        ) from error
    if isinstance(reply, str):
        raise RuntimeError(
            f"rank {rank} of torch's {name} has failed: {reply}. Run the schedule with torchrun to "
            "see more"
        )
    return reply
