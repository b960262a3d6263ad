"""The GPUs as torch sees them: devices, memory, and current streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ... import _C
from ...tensors.trees import all_tensors
from ...torch_private import release_pool, stream_setter
from ..devices import DeviceLane

# An event marks a point in the work of a stream.
Event = torch.cuda.Event
# With a timeout, returns when a function returns true, or when no step is under way; raises
# PipelineStalled where a step stalls. Without a timeout, returns immediately.
Settle = Callable[[Callable[[], bool] | None], None]
Returned = TypeVar("Returned")


class Gpus:
    """The GPUs of some lanes, each lane with the stream on which it computes.

    Args:
        lanes: the devices of a plan.
        settle: called before the host waits for GPUs.
    """

    def __init__(self, lanes: Sequence[DeviceLane], settle: Settle) -> None:
        torch.cuda.init()
        self._settle = settle
        self._devices = [lane.device for lane in lanes]
        self.lanes = _C.Lanes([(lane.device.index, lane.part, lane.num_parts) for lane in lanes])
        self._compute = [
            torch.cuda.ExternalStream(self.lanes.compute(number), device)
            for number, device in enumerate(self._devices)
        ]
        self._set = [stream_setter(stream) for stream in self._compute]
        self._unique = sorted({device.index for device in self._devices})
        # Rings are allocated on streams that run no kernels, so that torch never gives them memory
        # that a kernel still uses. A stream of torch's own pool may also be used by the user.
        self._ring_streams = {
            gpu: torch.cuda.ExternalStream(self.lanes.ring(gpu), gpu) for gpu in self._unique
        }
        # Streams that replace the caller's streams in `aside`.
        self._asides = [torch.cuda.Stream(gpu) for gpu in self._unique]
        # Streams for copies between GPU and host, by GPU and by whether copies go to the host.
        self._beside: dict[tuple[int, bool], torch.cuda.Stream] = {}

    def enable_peer(self, sender: int, receiver: int) -> None:
        """Has torch enable peer access from one lane's GPU to the other's, which supports it.

        The driver alone cannot enable it for memory that torch maps itself (expandable segments).
        """
        torch.empty(1, device=self._devices[sender]).to(self._devices[receiver])

    def device(self, lane: int) -> torch.device:
        """The GPU of a lane."""
        return self._devices[lane]

    def callers(self) -> dict[int, int]:
        """The handle of torch's current stream on each GPU."""
        return {gpu: torch.cuda.current_stream(gpu).cuda_stream for gpu in self._unique}

    def step(self) -> AbstractContextManager[None]:
        """Makes the lanes' streams current, on every GPU, and restores the caller's at the end.

        All GPUs are set, because torch's copy between two GPUs runs on the current streams of both.
        """
        return self._current(self._compute)

    def enter_streams(self) -> None:
        """Makes the lanes' streams current on a thread that has no other use for streams."""
        for stream in self._compute:
            torch.cuda.set_stream(stream)

    def aside(self) -> AbstractContextManager[None]:
        """A context with other current streams, which first wait for the caller's streams."""
        for stream in self._asides:
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        return self._current(self._asides)

    @contextmanager
    def _current(self, streams: Sequence[torch.cuda.Stream]) -> Iterator[None]:
        before = [torch.cuda.current_stream(gpu) for gpu in self._unique]
        # This restores the caller's device without creating a CUDA context on it.
        with torch.cuda.device(self._unique[0]):
            try:
                for stream in streams:
                    torch.cuda.set_stream(stream)
                yield
            finally:
                for stream in before:
                    torch.cuda.set_stream(stream)

    def mark(self) -> list[Event]:
        """Events after all work that the callers' streams hold so far."""
        return [torch.cuda.current_stream(gpu).record_event() for gpu in self._unique]

    def mark_for_host(self) -> HostMarks:
        """The same for the host to wait for."""
        return HostMarks(self.mark(), self._settle)

    def follow(self, mark: Sequence[Event], output: Any) -> None:
        """Has the callers' streams wait for the mark, and records their use of the output."""
        for gpu, event in zip(self._unique, mark, strict=True):
            torch.cuda.current_stream(gpu).wait_event(event)
        for tensor in all_tensors(output):
            if tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def on_stream(self, lane: int, run: Callable[[int], Returned]) -> Callable[[int], Returned]:
        """Calls on the lane's GPU and stream, which stay current; `step` restores the caller's.

        `torch.cuda.stream` would ask for the current stream and set it again, which takes as long
        as torch takes to issue a small kernel.
        """
        set_stream = self._set[lane]

        def act(microbatch: int) -> Returned:
            set_stream()
            return run(microbatch)

        return act

    def on_lane(self, lane: int, num_bytes: int) -> Tensor:
        """Bytes on a lane's GPU that no other tensor has used in this step."""
        device = self._devices[lane]
        with torch.cuda.stream(self._ring_streams[device.index]):
            # torch.empty would fill the memory under deterministic algorithms, and no stream waits
            # for a fill on the ring stream.
            storage = torch.UntypedStorage(num_bytes, device=device)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def pinned(self, num_bytes: int) -> Tensor:
        """Pinned bytes of the host, which GPUs can copy from and to."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy_beside(
        self, lane: int, pairs: Sequence[tuple[Tensor, Tensor]], *, to_host: bool
    ) -> HostMarks:
        """Copies between a lane's GPU and pinned memory, after torch's current stream.

        Returns:
            The end of the copies. Until then no stream may write to their sources.
        """
        gpu = self._devices[lane].index
        if (gpu, to_host) not in self._beside:
            self._beside[gpu, to_host] = torch.cuda.Stream(gpu)
        stream = self._beside[gpu, to_host]
        stream.wait_stream(torch.cuda.current_stream(gpu))
        with torch.cuda.stream(stream):
            for source, into in pairs:
                into.copy_(source, non_blocking=True)
        return HostMarks([stream.record_event()], self._settle)

    def join_beside(self) -> None:
        """Has torch's current streams wait for all copies that `copy_beside` has issued."""
        for (gpu, _), stream in self._beside.items():
            torch.cuda.current_stream(gpu).wait_stream(stream)

    def generators(self) -> list[int]:
        """The offsets of the default generators, which change when a kernel draws."""
        return [torch.cuda.default_generators[gpu].get_offset() for gpu in self._unique]

    def give_back_cache(self) -> None:
        """Waits for the GPUs and gives them memory back that torch only keeps for reuse.

        Blocks that steps have left behind cannot serve the pools of graphs.
        """
        self.synchronize()
        torch.cuda.empty_cache()

    def room(self, lane: int) -> tuple[int, int]:
        """Bytes that torch has of a lane's GPU, and bytes that nobody has."""
        device = self._devices[lane]
        return torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0]

    def pool(self) -> Any:
        """A memory pool for graphs that are replayed in the order of their capture."""
        return torch.cuda.graph_pool_handle()

    def capture(self, lane: int, pool: Any, run: Callable[[], object]) -> CapturedGraph:
        """Captures the work that `run` issues to the lane's stream, without executing it."""
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.stream(self._compute[lane]):
            try:
                # In the default mode, a CUDA call of any thread could break the capture.
                graph.capture_begin(pool, capture_error_mode="thread_local")
                run()
                with warnings.catch_warnings():
                    # An action may have no work, such as the first stage's I.
                    warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                    graph.capture_end()
            except BaseException:
                _abandon(graph, self._devices[lane].index, pool)
                raise
            # The graph is instantiated here, where the lane's GPU is current.
            graph.instantiate()
        return CapturedGraph(graph, graph.raw_cuda_graph_exec(), graph.raw_cuda_graph())

    def synchronize(self) -> None:
        """Waits until all GPUs have finished the issued work.

        Raises:
            PipelineStalled: a step has stalled; the GPUs may not have finished.
        """
        self._settle(None)
        for gpu in self._unique:
            torch.cuda.synchronize(gpu)


@dataclass(frozen=True)
class HostMarks:
    """Events that the host can wait for."""

    events: Sequence[Event]
    settle: Settle

    def wait(self) -> None:
        """Returns when all work before the events is done.

        Raises:
            PipelineStalled: a step has stalled, perhaps before the events.
        """
        self.settle(lambda: all(event.query() for event in self.events))
        for event in self.events:
            event.synchronize()


@dataclass(frozen=True)
class CapturedGraph:
    """A captured graph: torch's object, which owns it, and the driver's handles."""

    captured: torch.cuda.CUDAGraph
    exec: int
    graph: int


# Captures that torch could not end. torch's allocator of pinned memory still queries them.
_abandoned: list[torch.cuda.CUDAGraph] = []


def _abandon(graph: torch.cuda.CUDAGraph, gpu: int, pool: Any) -> None:
    """Ends a failed capture. Raises nothing itself, because the first error matters.

    torch cannot end a capture that the driver has invalidated, because a call in it waited for the
    GPU. Without the cleanup here, torch's allocator would no longer free its cache to make room,
    and the default generator would refuse to draw outside captures.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        _abandoned.append(graph)
        release_pool(gpu, pool)
        with suppress(RuntimeError):
            generator = torch.cuda.default_generators[gpu]
            generator.graphsafe_set_state(generator.clone_state())
