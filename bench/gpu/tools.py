"""Shared by the sections: the driver by cuda-bindings, raw graph launches, and clocks."""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

DEVICE = torch.device("cuda", 0)


def driver() -> Any:
    """The driver's functions. Imported late, so that a section can be described without it."""
    return importlib.import_module("cuda.bindings.driver")


def checked(result: tuple[Any, ...]) -> Any:
    """The results of a call of cuda-bindings behind its status.

    Raises:
        RuntimeError: the status is an error.
    """
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"the driver said {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def own_stream() -> torch.cuda.ExternalStream:
    """A non-blocking stream that nobody else has; torch's come from a pool that wraps."""
    torch.cuda.init()
    torch.cuda.synchronize()
    non_blocking = 1
    handle = checked(driver().cuStreamCreateWithPriority(non_blocking, 0))
    return torch.cuda.ExternalStream(int(handle), device=DEVICE)


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None
) -> Iterator[None]:
    """Captures on a stream, as pykern does: thread-local, without torch.cuda.graph's clean-up."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


def captured(
    work: Callable[[], Any], stream: torch.cuda.Stream, pool: Any = None, *, keep: bool = False
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `work` and what it returned. Call `warm` before, for libraries that initialise."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep)
    with capturing(graph, stream, pool):
        result = work()
    if keep:
        graph.instantiate()
    torch.cuda.synchronize()
    return graph, result


def warm(work: Callable[[], Any], stream: torch.cuda.Stream) -> None:
    """Runs `work` a few times on the stream that it will be captured on."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()


def launch(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
    """Launches the raw graph, as pykern's dispatcher does."""
    checked(driver().cuGraphLaunch(graph.raw_cuda_graph_exec(), stream.cuda_stream))


def call_us(call: Callable[[], Any], calls: int = 100, rounds: int = 20) -> float:
    """Median CPU microseconds of a call, whose queue is emptied between rounds."""
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter_ns() - start) / calls / 1e3)
    torch.cuda.synchronize()
    return round(statistics.median(samples), 3)


def elapsed_ms(issue: Callable[[], Any], streams: Sequence[torch.cuda.Stream]) -> float:
    """GPU milliseconds between the first and the last work that `issue` puts on the streams."""
    current = torch.cuda.current_stream()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record(current)
    for stream in streams:
        stream.wait_event(start)
    issue()
    for stream in streams:
        current.wait_stream(stream)
    end.record(current)
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
