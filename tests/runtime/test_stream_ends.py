"""Every way in which a stream of batches may end, after which the pipeline runs again."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from tests.runtime.streaming import Sleeps, numbered, pipeline
from tests.runtime.test_exit import run_python


class Fails(nn.Module):
    """Raises `error` for a microbatch that begins with that number."""

    def __init__(self, error: BaseException, number: float) -> None:
        super().__init__()
        self.error, self.number = error, number

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] == self.number:
            raise self.error
        return x


@pytest.mark.parametrize("end", ["break", "close", "error of the caller"])
def test_who_leaves_early_leaves_nothing_behind(end: str) -> None:
    events: list[str] = []
    threads = threading.active_count()
    with pipeline([Sleeps("0", events), Sleeps("1", events)]) as pipe:
        workers = threading.active_count()
        stream = pipe.stream(iter(lambda: torch.ones(1, 2), None))
        if end == "close":
            next(stream)
            stream.close()
        elif end == "break":
            for _ in stream:
                break
            del stream, _
        else:
            next(stream)
            with pytest.raises(ZeroDivisionError), closing(stream):
                len(events) // 0
        num_events = len(events)
        assert threading.active_count() == workers
        time.sleep(0.01)
        assert len(events) == num_events
        assert torch.equal(pipe(torch.ones(1, 2)), torch.ones(1, 2))
    assert threading.active_count() <= threads + 2


def test_the_pipeline_does_nothing_else_while_it_streams() -> None:
    with pipeline([nn.Identity(), nn.Identity()]) as pipe:
        stream = pipe.stream(numbered(9))
        other = pipe.stream(numbered(1))
        assert int(next(stream)[0, 0]) == 0
        for refused in (lambda: pipe(torch.ones(1, 2)), lambda: next(other)):
            with pytest.raises(RuntimeError, match="the pipeline is streaming"):
                refused()
        assert [int(y[0, 0]) for y in stream] == list(range(1, 9))
        assert list(pipe.stream([])) == []
        with pytest.raises(TypeError, match="batches must be an iterable"):
            pipe.stream(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("error_type", [ArithmeticError, KeyboardInterrupt, GeneratorExit])
def test_the_first_exception_of_a_stage_arrives(
    stage: int, error_type: type[BaseException]
) -> None:
    error = error_type("planted")
    layers: list[nn.Module] = [nn.Identity(), nn.Identity()]
    layers[stage] = Fails(error, 3.0)
    with pipeline(layers, microbatches=2) as pipe:
        outputs: list[Tensor] = []
        stream = pipe.stream([torch.cat(numbered(2)), torch.cat(numbered(4)[2:])] * 3)
        with pytest.raises(error_type) as caught:
            outputs.extend(stream)
        assert caught.value is error
        assert error.__notes__ == [
            "pykern: raised in batch 1 of the stream",
            f"pykern: raised in stage {stage}, microbatch 1, action {stage}F1, device {stage}",
        ]
        assert len(outputs) <= 1
        assert all(map(torch.equal, pipe.stream(numbered(3)), numbered(3)))


def test_the_exception_of_the_batches_comes_after_the_outputs_before_it() -> None:
    error = ValueError("planted")

    def broken() -> Iterator[Tensor]:
        yield from numbered(5)
        raise error

    with pipeline([nn.Identity(), nn.Identity()]) as pipe:
        stream = pipe.stream(broken())
        assert [int(next(stream)[0, 0]) for _ in range(5)] == list(range(5))
        with pytest.raises(ValueError, match="planted") as caught:
            next(stream)
        assert caught.value is error
        stream = pipe.stream([*numbered(2), torch.ones(0, 2), *numbered(2)])
        assert [int(next(stream)[0, 0]) for _ in range(2)] == [0, 1]
        with pytest.raises(pykern.SplitError, match="at least 1 row, got 0"):
            next(stream)
        assert list(stream) == []
        pipe(torch.ones(1, 2))


@pytest.mark.parametrize("where", ["a stage", "the batches"])
def test_ctrl_c_reaches_the_caller_soon(where: str) -> None:
    def batches() -> Iterator[Tensor]:
        yield from numbered(1)
        if where == "the batches":
            time.sleep(5)
        yield from numbered(9)

    def interrupt() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    events: list[str] = []
    layers = [Sleeps("0", events), Sleeps("1", events)]
    with pipeline(layers) as pipe:
        for layer in layers:
            layer.seconds = 0.01 if where == "the batches" else 0.3
        begin = time.monotonic()
        threading.Timer(0.15, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            list(pipe.stream(batches()))
        # An action under way ends first: nothing wakes a sleep.
        assert time.monotonic() - begin < 2
        for layer in layers:
            layer.seconds = 0.0
        assert all(map(torch.equal, pipe.stream(numbered(3)), numbered(3)))


def test_what_a_step_would_refuse_in_the_end_a_stream_refuses_in_the_end() -> None:
    class Counts(nn.Module):
        number: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("number", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.number += 1
            return x

    shared, batch = Counts(), torch.ones(1, 2)
    with pykern.Pipeline([shared, shared], devices="cpu:2", microbatches=1) as pipe:
        with pytest.raises(RuntimeError, match="wrote the buffer"):
            pipe(batch)
        with pytest.raises(RuntimeError, match="wrote the buffer"):
            list(pipe.stream([batch] * 3))


def test_a_closed_pipeline_ends_its_stream() -> None:
    pipe = pipeline([nn.Identity(), nn.Identity()])
    stream = pipe.stream(iter(lambda: torch.ones(1, 2), None))
    next(stream)
    pipe.close()
    with pytest.raises(RuntimeError, match="closed"):
        list(stream)


@pytest.mark.forks
def test_a_forked_child_is_told_and_a_process_may_end_in_the_middle() -> None:
    result = run_python(
        """
        stream = pipe.stream(iter(lambda: x, None))
        next(stream)
        next(stream)
        child = os.fork()
        if child == 0:
            try:
                next(stream)
            except RuntimeError as error:
                sys.exit(11 if "does not survive a fork" in str(error) else 12)
        status = os.waitpid(child, 0)[1]
        assert torch.equal(next(stream), 4 * x)
        pipe.mine = [pipe, stream]
        sys.exit(os.waitstatus_to_exitcode(status))
        """
    )
    assert (result.returncode, result.stderr) == (11, "")


def test_a_stream_may_be_collected_by_one_of_its_stages() -> None:
    class Collects(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] == 2:
                left.wait(timeout=10)
                gc.collect()
                collected.set()
            return x

    left, collected = threading.Event(), threading.Event()
    with pipeline([nn.Identity(), Collects()]) as pipe:
        gc.disable()
        try:
            num_threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
            cycle: list[Any] = [pipe.stream(numbered(9))]
            cycle.append(cycle)
            next(cycle[0])
            del cycle
            left.set()
            assert collected.wait(timeout=10)
        finally:
            gc.enable()
        # Its own thread ends it.
        deadline = time.monotonic() + 10
        while len(os.listdir("/proc/self/task")) > num_threads:  # noqa: PTH208
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert torch.equal(pipe(torch.ones(1, 2)), torch.ones(1, 2))
