"""The GPUs as torch sees them: devices, memory, and which stream is current."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ... import _C
from ...tensors.trees import all_tensors
from ...torch_private import release_pool
from ..devices import DeviceLane

# How many queues the hardware serves at once, 8 if nothing is said. More streams than queues are
# still right, but work waits for other work that it does not need.
_QUEUES = ("CUDA_DEVICE_MAX_CONNECTIONS", "32")


# When a stream has come so far.
Event = torch.cuda.Event


class Gpus:
    """The GPUs of some lanes, each lane with the stream on which it computes."""

    def __init__(self, lanes: Sequence[DeviceLane]) -> None:
        # The driver reads it when the first context of the process is made.
        os.environ.setdefault(*_QUEUES)
        torch.cuda.init()
        self._devices = [lane.device for lane in lanes]
        self.lanes = _C.Lanes([(lane.device.index, lane.part, lane.num_parts) for lane in lanes])
        self._compute = [
            torch.cuda.ExternalStream(self.lanes.compute(number), device)
            for number, device in enumerate(self._devices)
        ]
        self._unique = sorted({device.index for device in self._devices})
        # Rings are allocated on streams that compute nothing, so that no memory comes back to them
        # that a kernel may still use. torch's own streams may be the user's as well.
        self._ring_streams = {
            gpu: torch.cuda.ExternalStream(self.lanes.ring(gpu), gpu) for gpu in self._unique
        }
        # For what goes on beside the caller.
        self._asides = [torch.cuda.Stream(gpu) for gpu in self._unique]
        # For copies between a GPU and the host, by whether they go to the host.
        self._beside: dict[tuple[int, bool], torch.cuda.Stream] = {}
        self._connect()

    def _connect(self) -> None:
        """Has torch enable access between all pairs of GPUs that can have it.

        The driver alone could not do it for memory that torch maps itself (expandable segments).
        """
        for sender in self._unique:
            for receiver in self._unique:
                if sender != receiver and torch.cuda.can_device_access_peer(sender, receiver):
                    torch.empty(1, device=f"cuda:{sender}").to(f"cuda:{receiver}")

    def device(self, lane: int) -> torch.device:
        """The GPU of a lane."""
        return self._devices[lane]

    def callers(self) -> dict[int, int]:
        """Handle of torch's current stream on each GPU."""
        return {gpu: torch.cuda.current_stream(gpu).cuda_stream for gpu in self._unique}

    def step(self) -> AbstractContextManager[None]:
        """Makes the lanes' streams current, on every GPU, and restores the caller's at the end.

        On every GPU, because a copy by torch between two of them runs on the current streams of
        both.
        """
        return self._current(self._compute)

    def aside(self) -> AbstractContextManager[None]:
        """Makes other streams the callers', which begin after what those hold so far."""
        for stream in self._asides:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return self._current(self._asides)

    @contextmanager
    def _current(self, streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
        before = [torch.cuda.current_stream(gpu) for gpu in self._unique]
        # Restores the caller's device without making a context there, where there was none.
        with torch.cuda.device(self._unique[0]):
            try:
                for stream in streams:
                    torch.cuda.set_stream(stream)
                yield
            finally:
                for stream in before:
                    torch.cuda.set_stream(stream)

    def mark(self) -> list[Event]:
        """When the callers' streams will have done what they hold so far."""
        return [torch.cuda.current_stream(gpu).record_event() for gpu in self._unique]

    def follow(self, mark: Sequence[Event], output: Any) -> None:
        """Has the callers' streams wait for the mark, and use an output that was made aside."""
        for gpu, event in zip(self._unique, mark, strict=True):
            torch.cuda.current_stream(gpu).wait_event(event)
        for tensor in all_tensors(output):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def active(self, lane: int) -> AbstractContextManager[object]:
        """Makes the lane's GPU and stream current."""
        return torch.cuda.stream(self._compute[lane])

    def on_lane(self, lane: int, num_bytes: int) -> Tensor:
        """Bytes on a lane's GPU that nothing else has used in this step."""
        device = self._devices[lane]
        with torch.cuda.stream(self._ring_streams[device.index]):
            # Not torch.empty, which fills what it gives under deterministic algorithms: nothing
            # waits for the ring stream.
            storage = torch.UntypedStorage(num_bytes, device=device)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def pinned(self, num_bytes: int) -> Tensor:
        """Bytes of the host that GPUs can copy from and to."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_beside(
        self, lane: int, pairs: Sequence[tuple[Tensor, Tensor]], *, to_host: bool
    ) -> Event:
        """Copies between a lane's GPU and pinned memory, behind torch's current stream.

        Returns:
            When they are done; until then no stream may write what they read.
        """
        gpu = self._devices[lane].index
        if (gpu, to_host) not in self._beside:
            self._beside[gpu, to_host] = torch.cuda.Stream(gpu)
        stream = self._beside[gpu, to_host]
        stream.wait_stream(torch.cuda.current_stream(gpu))
        with torch.cuda.stream(stream):
            for source, into in pairs:
                into.copy_(source, non_blocking=True)
        return cast(Event, stream.record_event())

    def join_beside(self) -> None:
        """Has torch's current streams wait for all copies that `copy_beside` has issued."""
        for (gpu, _), stream in self._beside.items():
            torch.cuda.current_stream(gpu).wait_stream(stream)

    def generators(self) -> list[int]:
        """How far the default generators have come: equal as long as nobody draws."""
        return [torch.cuda.default_generators[gpu].get_offset() for gpu in self._unique]

    def pool(self) -> Any:
        """Memory for graphs that are replayed in the order in which they are captured."""
        return torch.cuda.graph_pool_handle()

    def capture(self, lane: int, pool: Any, run: Callable[[], object]) -> CapturedGraph:
        """What `run` issues to the lane's stream, without executing it."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self._compute[lane]):
            try:
                # The default would let any thread's CUDA call spoil it.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                run()
                graph.capture_end()
            except BaseException:
                _abandon(graph, self._devices[lane].index, pool)
                raise
            # Here, where the lane's GPU is the current one.
            graph.instantiate()
        return CapturedGraph(graph, graph.raw_cuda_graph_exec(), graph.raw_cuda_graph())

    def synchronize(self) -> None:
        """Waits until all GPUs have done what was issued."""
        for gpu in self._unique:
            torch.cuda.synchronize(gpu)


@dataclass(frozen=True)
class CapturedGraph:
    """A captured graph: torch's, which keeps it, and the driver's handles of it."""

    captured: torch.cuda.CUDAGraph
    exec: int
    graph: int


# Captures that torch could not end: its allocator of pinned memory goes on asking them.
_abandoned: list[torch.cuda.CUDAGraph] = []


def _abandon(graph: torch.cuda.CUDAGraph, gpu: int, pool: Any) -> None:
    """Ends a capture in which something went wrong; that is what matters, so nothing is raised.

    A capture that the driver has given up, because something in it waited for the GPU, torch cannot
    end. Without the rest its allocator would not make room by freeing what it caches any more, and
    the default generator would refuse to draw outside captures.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        _abandoned.append(graph)
        release_pool(gpu, pool)
        with suppress(RuntimeError):
            generator = torch.cuda.default_generators[gpu]
            generator.graphsafe_set_state(generator.clone_state())
