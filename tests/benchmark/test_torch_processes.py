"""torch.distributed.pipelining takes a benchmark's step in processes, or the reason is told."""

import os
import signal
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pykern.benchmark import torch_processes
from pykern.benchmark.answer import Answer
from pykern.benchmark.gpt_task import GptTask
from pykern.benchmark.torch_processes import torch_steps
from pykern.benchmark.torch_rank import RankJob, schedules_of_torch
from pykern.models import next_token_loss
from pykern.runtime.devices import DeviceLane

TASK = GptTask(num_devices=2, num_microbatches=4, width=16, heads=2, context=8, rows=1)


def children() -> set[int]:
    """The processes that this one has started and not waited for."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(process) for each in lists for process in each.read_text().split()}


def test_each_schedule_of_torch_is_timed_and_has_the_answer() -> None:
    before = children()
    found = dict(torch_steps(TASK, "cpu:2", warmups=1, steps=2))
    assert list(found) == schedules_of_torch()
    assert len(found) == (4 if torch.__version__ >= "2.13" else 3)
    assert all(len(times) == 2 and min(times) > 0 for times in found.values())
    assert children() == before


def test_a_loss_that_is_not_pykerns_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def more(output: Tensor, target: Tensor) -> Tensor:
        return next_token_loss(output, target) + 1

    monkeypatch.setattr(torch_processes, "next_token_loss", more)
    with pytest.raises(RuntimeError, match="rank 1 of torch's GPipe has failed: ValueError: the l"):
        list(torch_steps(TASK, "cpu:2", warmups=1, steps=2))


def test_a_gradient_that_is_not_pykerns_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Answer.written

    def changed(loss: float, gradients: dict[str, Tensor], file: Path) -> Answer:
        gradients["0.tokens.weight"][3] += 1.0
        return written(loss, gradients, file)

    monkeypatch.setattr(Answer, "written", changed)
    with pytest.raises(RuntimeError, match=r"the gradient of 0.tokens.weight must be that of pyk"):
        list(torch_steps(TASK, "cpu:2", warmups=1, steps=2))


def test_a_process_that_ends_is_told_and_the_other_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, before = torch_processes._start, children()

    def start_and_end(job: RankJob, undo: ExitStack) -> Connection:
        others = children()
        pipe = start(job, undo)
        if job.rank == 1:
            (process,) = children() - others
            os.kill(process, signal.SIGKILL)
        return pipe

    monkeypatch.setattr(torch_processes, "_start", start_and_end)
    with pytest.raises(RuntimeError, match="rank 1 of torch's GPipe has ended"):
        list(torch_steps(TASK, "cpu:2", warmups=1, steps=2))
    assert children() == before


def test_processes_that_do_not_reply_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_processes._LIMITS_S, "cpu", 0.0)
    before = children()
    with pytest.raises(RuntimeError, match="torch's GPipe has not ended within 0 s"):
        list(torch_steps(TASK, "cpu:2", warmups=1, steps=2))
    assert children() == before


def test_processes_have_one_limit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that replied late gave the others the whole limit again."""
    now, asked = [0.0], []

    def late(missing: list[Connection], limit_s: float) -> list[Connection]:
        asked.append(limit_s)
        now[0] += 30.0
        return [] if now[0] > 50 else missing[:1]

    monkeypatch.setattr(torch_processes, "wait", late)
    monkeypatch.setattr(torch_processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(torch_processes, "_reply", lambda *_: [1])
    pipes = [end for _ in range(3) for end in Pipe()][:3]
    with pytest.raises(RuntimeError, match="torch's 1F1B has not ended within 50 s"):
        torch_processes._replies("1F1B", pipes, 50.0)
    assert asked == [50.0, 20.0]


def test_devices_that_torch_cannot_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = GptTask(num_devices=1, num_microbatches=2, width=16, heads=2, context=8, rows=1)
    with pytest.raises(ValueError, match=r"devices must be two or more .*, got 1"):
        next(torch_steps(one, "cpu:1", warmups=1, steps=2))
    parts = [DeviceLane(torch.device("cuda", 0), part, 2) for part in range(2)]
    monkeypatch.setattr(torch_processes, "parse_devices", lambda _: parts)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "nccl")
    with pytest.raises(ValueError, match="devices must be a whole GPU for each process"):
        next(torch_steps(TASK, "cuda:0/2", warmups=1, steps=2))
    monkeypatch.setattr(dist, "is_backend_available", lambda _: False)
    with pytest.raises(ValueError, match="torch must have nccl"):
        next(torch_steps(TASK, "cuda:0/2", warmups=1, steps=2))
