"""Stand-ins for all that sections of the GPU session need beside torch and the driver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu import green
from tests.device_oracle.bindings import bytes_at
from tests.device_oracle.oracle import Stream
from tests.fake_cuda.fake import FakeCuda


class Cupy:
    """Takes the place of cupy, and has one kernel: `green`'s, which tells where its blocks run.

    Args:
        fake: knows the multiprocessors of a stream.
        keeps_group: whether a kernel of a graph stays on those of the stream of its capture. Else
            it may run on all.
    """

    def __init__(self, fake: FakeCuda, *, keeps_group: bool = True) -> None:
        self._fake = fake
        self._keeps_group = keeps_group
        self._handle = 0
        self.cuda = SimpleNamespace(ExternalStream=self._on)

    def RawKernel(self, source: str, name: str) -> Any:
        assert (source, name) == (green.SOURCE, "where")
        return self._where

    @contextmanager
    def _on(self, handle: int) -> Iterator[None]:
        self._handle = handle
        yield
        self._handle = 0

    def _where(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[int]) -> None:
        places = self._fake.multiprocessors(self._handle)
        if torch.cuda.is_current_stream_capturing() and not self._keeps_group:
            places = range(132)
        on_stream: Any = torch.cuda.stream
        with on_stream(Stream(0, self._handle)):
            seen = bytes_at(arguments[0], 4 * grid[0]).view(torch.int32)
            seen.fill_(1).cumsum_(0).remainder_(len(places)).add_(places.start)


class Cupti(profile):
    """Takes the place of torch's profiler: sees the CPU, and graphs that the driver launches."""

    def __init__(self, fake: FakeCuda, activities: Sequence[ProfilerActivity]) -> None:
        assert ProfilerActivity.CUDA in activities
        # torch 2.11 warns where it is not told what becomes of a cycle's events.
        super().__init__(activities=[ProfilerActivity.CPU], acc_events=True)
        self._fake = fake

    def __enter__(self) -> Self:
        self._before = self._fake.calls("cuGraphLaunch")
        super().__enter__()
        return self

    def events(self) -> Any:
        launched = self._fake.calls("cuGraphLaunch") - self._before
        return [*super().events(), *[SimpleNamespace(name="cuGraphLaunch")] * launched]
