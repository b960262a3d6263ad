"""A stage that hangs: what the step raises, and what is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.runtime.test_exit import run_python

BATCH = torch.ones(4, 2)
# Much less than a test may take, and than a stage hangs by itself.
SOON = 0.1


class Hangs(nn.Module):
    """Waits in its forward of one number until it is let go."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.how = how
        self.go = threading.Event()
        self.queue: Queue[None] = Queue()
        self.lock = threading.Lock()
        self.lock.acquire()
        self.inside = threading.Event()
        self.came_back = threading.Event()

    def let_go(self) -> None:
        self.go.set()
        self.queue.put(None)
        self.lock.release()

    def forward(self, x: Tensor) -> Tensor:
        if not self.go.is_set():
            self.inside.set()
            try:
                getattr(self, f"in_{self.how}")()
            finally:
                self.came_back.set()
        y: Tensor = self.linear(x)
        return y

    def in_sleep(self) -> None:
        while not self.go.is_set():
            time.sleep(0.01)

    def in_lock(self) -> None:
        with self.lock:
            pass

    def in_queue(self) -> None:
        self.queue.get()

    def in_c(self) -> None:
        """Without the interpreter lock."""
        read, write = os.pipe()
        threading.Thread(target=lambda: (self.go.wait(), os.write(write, b"1"))).start()
        os.read(read, 1)


@contextmanager
def hanging(how: str, timeout: float | None, **options: Any) -> Iterator[tuple[Any, Hangs]]:
    layer = Hangs(how)
    arguments: dict[str, Any] = {
        "microbatches": 2,
        "loss_fn": F.mse_loss,
        "devices": "cpu:3",
    } | options
    kind = pykern.AsyncPipeline if "optimizer" in options else pykern.Pipeline
    pipe = kind([nn.Linear(2, 2), layer, nn.Linear(2, 2)], timeout=timeout, **arguments)
    try:
        yield pipe, layer
    finally:
        layer.let_go()
        assert layer.came_back.wait(30)
        pipe.close()


CALLS: dict[str, Callable[[pykern.Pipeline], object]] = {
    "step": lambda pipe: pipe.step(BATCH, target=BATCH),
    "forward": lambda pipe: pipe(BATCH),
    "stream": lambda pipe: list(pipe.stream([BATCH] * 5)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("how", ["lock", "queue", "c"])
def test_a_timeout_tells_who_waits_for_whom(how: str, call: str) -> None:
    with hanging(how, SOON) as (pipe, layer):
        if call == "stream":
            # So that it is known whether layers draw.
            layer.go.set()
            with torch.no_grad():
                pipe(BATCH)
            layer.go.clear()
        with pytest.raises(pykern.PipelineStalled) as caught:
            CALLS[call](pipe)
        message = str(caught.value)
        of_batch = " of batch 0 of the stream" if call == "stream" else ""
        where = f"stage 1, microbatch 0{of_batch}, action 1F0, device 1"
        assert message.startswith(f"{where} has not ended for ")
        assert f"in in_{how}" in message
        if call == "step":
            assert "device 2 waits for 1F0 of device 1, to go on with 2F0" in message
            assert "device 0 waits for 1B0 of device 1, to go on with 0B0" in message
        assert caught.value.__notes__[-1] == (
            "pykern: raised in stage 1, microbatch 0, action 1F0, device 1"
        )
        for again in CALLS.values():
            with pytest.raises(RuntimeError, match=r"is closed: a stage has not come back"):
                again(pipe)
        pipe.close()
        assert torch.is_grad_enabled()
        # Another pipeline goes on with the layers.
        layer.go.set()
        with pykern.Pipeline(list(pipe.children()), devices="cpu:2", microbatches=2) as other:
            assert other(BATCH).shape == (4, 2)


@pytest.mark.parametrize("call", CALLS)
def test_the_second_interrupt_gives_up(call: str) -> None:
    with hanging("lock", None) as (pipe, layer):
        if call == "stream":
            layer.go.set()
            with torch.no_grad():
                pipe(BATCH)
            layer.go.clear()

        def interrupt() -> None:
            assert layer.inside.wait(30)
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(pykern.PipelineStalled, match="in in_lock") as caught:
            CALLS[call](pipe)
        thread.join()
        assert isinstance(caught.value.__cause__, KeyboardInterrupt)
        with pytest.raises(RuntimeError, match="is closed: a stage has not come back"):
            pipe(BATCH)


def test_an_asynchronous_schedule_stalls_alike() -> None:
    options: dict[str, Any] = {
        "schedule": "pipedream",
        "optimizer": torch.optim.Adam,
        "microbatches": 4,
    }
    with hanging("queue", SOON, **options) as (pipe, _):
        with pytest.raises(pykern.PipelineStalled, match="action 1F0, device 1 has not ended"):
            pipe.step(BATCH, target=BATCH)
        with pytest.raises(RuntimeError, match="is closed"):
            pipe.step(BATCH, target=BATCH)


@pytest.mark.nightly
def test_a_step_may_take_longer_than_its_actions() -> None:
    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.05)
            return x

    layers = [nn.Linear(2, 2), Slow(), Slow()]
    with pykern.Pipeline(layers, devices="cpu:1", microbatches=64, timeout=3.0) as pipe:
        assert pipe(torch.ones(64, 2)).shape == (64, 2)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), "3", True])
def test_a_timeout_is_a_number_of_seconds(timeout: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout must be a number of seconds"):
        pykern.Pipeline([nn.Identity()], devices="cpu:1", microbatches=1, timeout=timeout)


END = """
import contextlib, sys, threading, time
from pathlib import Path
import torch
from torch import nn
import pykern

class Hangs(nn.Module):
    def forward(self, x):
        {hang}
        return x

pipe = pykern.Pipeline([Hangs(), nn.Identity()], devices="cpu:2", microbatches=1, timeout=0.1)
try:
    pipe(torch.ones(1, 2))
except pykern.PipelineStalled:
    print("stalled")

def names():
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between the two looks: it has no name any more.
        with contextlib.suppress(OSError):
            yield Path(task, "comm").read_text()

class Late:
    # The last objects to go, when Python has begun to shut down.
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

sys.late = Late()
{then}
sys.exit(7)
"""


FOR_EVER = "[lock.acquire() for lock in [threading.Lock()] * 2]"


@pytest.mark.parametrize("hang", ["time.sleep(0.8)", "time.sleep(600)", FOR_EVER])
def test_the_process_ends_although_a_stage_hangs(hang: str) -> None:
    """Also where the stage comes back while Python goes down."""
    code = END.format(
        hang=hang if "sleep" in hang else "l = threading.Lock(); l.acquire(); l.acquire()", then=""
    )
    result = run_python(code)
    assert (result.returncode, result.stdout, result.stderr) == (7, "stalled\n", "")


def test_a_stage_that_comes_back_ends_quietly() -> None:
    then = """
    while any(name.startswith("pykern dev") for name in names()):
        time.sleep(0.01)
    del pipe
    """
    result = run_python(END.format(hang="time.sleep(0.3)", then=textwrap.dedent(then)))
    assert (result.returncode, result.stdout, result.stderr) == (7, "stalled\n", "")


KEEPS = """
import ctypes, resource, sys, threading
import torch
from torch import nn
import pykern

class Keeps(nn.Module):
    hangs = False

    def forward(self, x):
        if self.hangs:
            # With the interpreter lock.
            ctypes.PyDLL(None).usleep({microseconds})
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return x

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
x = torch.ones(4, 2)
keeps = Keeps()
layers = [nn.Linear(2, 2), keeps, nn.Linear(2, 2)]
options = dict(microbatches={microbatches}, loss_fn=nn.functional.mse_loss, timeout=0.2)
pipe = pykern.Pipeline(layers, devices="cpu:3", **options)
with torch.no_grad():
    pipe(x)
keeps.hangs = True
try:
    {call}
except pykern.PipelineStalled as error:
    print(str(error).splitlines()[0])
"""
KEPT = "pykern: a call in C has kept the interpreter lock for "


@pytest.mark.parametrize(
    ("call", "where", "waits"),
    [
        (
            "pipe.step(x, target=x)",
            "stage 1, microbatch 0, action 1F0",
            "device 2 waits for 1F0 of device 1, to go on with 2F0",
        ),
        (
            "list(pipe.stream([x] * 3))",
            "stage 1, slot 0 of the stream, action 1F0",
            "Ctrl-\\ (SIGQUIT) ends the process",
        ),
    ],
)
def test_a_call_that_keeps_the_lock_is_told_while_it_hangs(
    call: str, where: str, waits: str
) -> None:
    """Neither this process nor its Ctrl-C could say so: all of that is Python code."""
    code = KEEPS.format(microseconds=600_000_000, microbatches=2, call=call)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            while not (lines and lines[-1].startswith("Ctrl-")):
                line = process.stderr.readline()
                assert line, lines
                lines.append(line.rstrip())
            process.send_signal(signal.SIGQUIT)
            assert process.wait(30) == -signal.SIGQUIT
        finally:
            process.kill()
    assert lines[0].startswith(KEPT)
    # Another device may have begun an action meanwhile, for which it needs the lock.
    assert any(line.startswith(f"device 1 is in {where} for ") for line in lines)
    assert waits in lines


def test_a_step_stalls_when_the_lock_comes_back() -> None:
    # One microbatch: with a second one, device 0 may be within 0F1 and wait for the lock, for as
    # long as device 1 is within 1F0.
    code = KEEPS.format(microseconds=600_000, microbatches=1, call="pipe.step(x, target=x)")
    result = run_python(code)
    assert result.returncode == 0
    assert result.stdout.startswith("stage 1, microbatch 0, action 1F0, device 1 has not ended for")
    assert result.stderr.count(KEPT) == 1
