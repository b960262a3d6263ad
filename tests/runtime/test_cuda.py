"""The calls of torch about the GPUs, with torch's own part played by the tests."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from pykern.runtime.gpu import cuda

POOL = (0, 7)
calls: list[Any] = []


class Graph:
    """A capture as torch's; the driver gives it up where the work waits for the GPU."""

    def __init__(self, keep_graph: bool) -> None:
        assert keep_graph

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        calls.append(("begin", pool, capture_error_mode))

    def capture_end(self) -> None:
        calls.append("end")
        if "wait" in calls:
            raise RuntimeError("capture was invalidated")

    def instantiate(self) -> None:
        calls.append("instantiate")

    def raw_cuda_graph_exec(self) -> int:
        return 1

    def raw_cuda_graph(self) -> int:
        return 2


class Generator:
    def clone_state(self) -> str:
        return "state"

    def graphsafe_set_state(self, state: str) -> None:
        calls.append(("generator", state))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[cuda.Gpus]:
    calls.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "default_generators", [None, Generator()])
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        note = lambda *given, name=name: calls.append((name, *given))  # noqa: E731
        monkeypatch.setattr(torch._C, name, note, raising=False)
    made = object.__new__(cuda.Gpus)
    made._devices = [torch.device("cuda", 1)]
    made._compute = [None]  # type: ignore[list-item]
    yield made
    cuda._abandoned.clear()


def test_a_capture_is_instantiated(gpus: cuda.Gpus) -> None:
    graph = gpus.capture(0, POOL, lambda: calls.append("run"))
    assert (graph.exec, graph.graph) == (1, 2)
    assert calls == [("begin", POOL, "thread_local"), "run", "end", "instantiate"]


def test_an_error_of_the_user_ends_the_capture(gpus: cuda.Gpus) -> None:
    def run() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        gpus.capture(0, POOL, run)
    assert calls[1:] == ["end"]
    assert cuda._abandoned == []


@pytest.mark.parametrize("tells", [True, False])
def test_a_capture_that_waited_is_ended_where_torch_does_not(gpus: cuda.Gpus, tells: bool) -> None:
    def run() -> None:
        calls.append("wait")
        if tells:
            raise ValueError("operation not permitted when stream is capturing")

    with pytest.raises(ValueError if tells else RuntimeError):
        gpus.capture(0, POOL, run)
    assert calls[-3:] == [
        ("_cuda_endAllocateToPool", 1, POOL),
        ("_cuda_releasePool", 1, POOL),
        ("generator", "state"),
    ]
    # Held, because torch still asks it whether a stream is in its capture.
    assert len(cuda._abandoned) == 1


@pytest.mark.parametrize("given", [None, "8"])
def test_queues_are_asked_for_before_cuda_begins(
    monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    """On import: a script may begin CUDA, by `model.cuda()`, before it makes a pipeline."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    ask = f"import os, pykern; print(os.environ[{name!r}])"
    told = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == (given or "32")
