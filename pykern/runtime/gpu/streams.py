"""The CUDA driver: a step is issued to the streams of all GPUs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise

import torch

from ... import _C
from ...plan import Kind, Plan, Timeline
from ...plan.halves import forwards_first
from ...trace.routes import BATCH, Direct
from ...user_code import warn
from ..batch import Batch
from ..devices import DeviceLane
from ..driver import Callbacks, Failure, Program
from ..loss import Losses
from ..microbatch import is_pinned
from ..profiled import follow_profiler
from ..stage.stage import Stage
from ..timeout import PipelineStalled
from . import cuda
from .capture.policy import Capture, CapturePolicy
from .capture.recording import Recording
from .host_link import GpuLink
from .issuing import Issuer
from .peers import PeerPairs
from .ring_transport import RingTransport, StreamCallback, carrier_of
from .rings import RingBuffers


class Streams:
    """Runs plans on the streams of lanes.

    A step returns when it is issued; torch's current streams wait for it. Backward runs on the
    thread that issues, in the order of the plan, not on autograd's threads.

    Args:
        lanes: the devices of the plan.
        capture: whether actions become CUDA graphs, as the user has asked.
        timeout: the longest time of an action or copy, in seconds; None for no limit.
        issuer: has the actions called.
    """

    def __init__(
        self,
        lanes: Sequence[DeviceLane],
        capture: Capture,
        timeout: float | None,
        issuer: Issuer,
    ) -> None:
        self.core = _C.StreamExecutor(timeout or 0.0, PipelineStalled)
        self.claim = self.core.claim
        self.gpus = cuda.Gpus(lanes, self.core.settle)
        self._peers = PeerPairs(self.gpus)
        self._capture = capture
        self._issuer = issuer
        self._policy: CapturePolicy | None = None
        self._lane_of: list[int] = []
        self._transports: list[RingTransport] = []
        # The last step may still run when its rings and graphs are freed, so their end waits. At
        # exit, the memory is not reused, so no wait is needed.
        self._end = weakref.finalize(self, _wait, self.core, self.gpus, self._transports)
        self._end.atexit = False

    def device(self, lane: int) -> torch.device:
        """The GPU of a lane."""
        return self.gpus.device(lane)

    def ready(self) -> None:
        """Raises PipelineStalled if a step has stalled, behind which copies would wait."""
        self.core.refuse_stalled()

    def direct(self, plan: Plan) -> Direct:
        """A function that tells whether values can go past the stages between two stages.

        In steps of forwards only, values cannot: a slot gets its next microbatch before a farther
        stage has read the tensors from it.
        """
        reaches = self._peers.reaches

        def between(lanes: Sequence[int], low: int, high: int) -> bool:
            if lanes[low] == lanes[high]:
                return True
            there, back = carrier_of(lanes, low, Kind.F), carrier_of(lanes, high, Kind.B)
            ends = ((low, high), (there, there + 1), (back - 1, back))
            return all(reaches(lanes[a], lanes[b]) and reaches(lanes[b], lanes[a]) for a, b in ends)

        def direct(low: int, high: int, with_gradients: bool) -> bool:
            if self._capture is not False:
                return False
            if low == BATCH:
                return True
            return with_gradients and all(between(of, low, high) for of in plan.placement.replicas)

        return direct

    @property
    def captures(self) -> bool:
        """Whether steps may be replayed without Python."""
        return self._capture is not False

    def connect(self, replicas: Sequence[Sequence[Stage]], plan: Plan) -> None:
        """Connects stages with their neighbours on other GPUs."""
        # Rings and programs ask the lanes, so the pairs are checked before.
        self._tell_of_detours(plan)
        lanes = self.gpus.lanes
        for stages, homes in zip(replicas, plan.placement.replicas, strict=True):
            rings = [RingBuffers(self.gpus, lane) for lane in homes]
            transports: list[RingTransport] = []
            for stage in stages:
                transports.append(RingTransport(stage.index, rings, transports, lanes))
                stage.transport = transports[-1]
            self._transports += transports
            self._lane_of += homes
        if self._capture is not False:
            homes = plan.placement.replicas[0]
            self._policy = CapturePolicy(self._capture, self.gpus, plan, replicas[0], homes)

    def _tell_of_detours(self, plan: Plan) -> None:
        """Warns, in a message for each cause, of pairs whose tensors go through the host."""
        ends = {ends for homes in plan.placement.replicas for ends in pairwise(homes)}
        ends |= {(high, low) for low, high in ends}
        detours = sorted((a, b) for a, b in ends if not self._peers.reaches(a, b))
        wrong = self._peers.wrong
        if wrong:
            names = ", ".join(f"{a} to {b}" for a, b in wrong)
            warn(
                f"copies between these devices of the plan arrive changed: {names}. Copies go "
                "through pinned memory of the host, which is slow. The driver says that the GPUs "
                "reach each other's memory; look for an IOMMU or PCIe access control (ACS)"
            )
        if unreached := [pair for pair in detours if pair not in wrong]:
            names = ", ".join(f"{a} to {b}" for a, b in unreached)
            warn(
                f"these devices of the plan do not reach each other's memory: {names}. "
                "Copies go through pinned memory of the host, which is slow"
            )

    def host_link(self, device: int) -> GpuLink:
        """The link that copies tensors of a device of the plan to the host and back."""
        return GpuLink(self.gpus, device)

    def transfer_bytes(self, lane: int) -> int:
        """The bytes of the rings on a lane."""
        lanes = zip(self._lane_of, self._transports, strict=True)
        return sum(transport.ring_bytes for of, transport in lanes if of == lane)

    def program(self, plan: Plan) -> _C.StreamProgram:
        """The plan as a program of this driver."""
        return _C.StreamProgram(plan, self.gpus.lanes)

    def halves(self, plan: Plan) -> tuple[_C.StreamProgram, _C.StreamProgram]:
        """A program of the plan's forwards, and one of its other actions, to run after them."""
        first, lanes = forwards_first(plan), self.gpus.lanes
        forwards = _C.StreamProgram.half(first, lanes, forwards=True)
        return forwards, _C.StreamProgram.half(first, lanes, forwards=False)

    def run(
        self, program: Program, callbacks: Callbacks, batch: Batch, *, traced: bool
    ) -> list[Failure]:
        """Issues a step for the holder of the claim; returns the failures.

        Raises:
            CudaError: the driver has failed; everything issued has ended.
            CannotCapture: the step must be captured, but cannot be.
        """
        assert isinstance(program, _C.StreamProgram)
        follow_profiler()
        with self._read_in_the_end(batch), torch.autograd.set_multithreading_enabled(False):
            recording = None if self._policy is None else self._policy.ready(program, batch)
            if recording is not None:
                return self._replay(recording, program, batch, traced=traced)
            return self._call(program, callbacks, batch, traced=traced)

    @contextmanager
    def _read_in_the_end(self, batch: Batch) -> Iterator[None]:
        """Waits at the end for copies of a pinned batch, which its owner may then refill.

        At the end everything is issued, so the GPUs have work meanwhile.
        """
        if not is_pinned(batch.given):
            yield
            return
        # The copies are on the callers' streams by now.
        read = self.gpus.mark_for_host()
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):
                read.wait()
            raise
        read.wait()

    def _call(
        self, program: _C.StreamProgram, callbacks: Callbacks, batch: Batch, *, traced: bool
    ) -> list[Failure]:
        for transport in self._transports:
            transport.begin(program)
        issue = self.gpus.on_stream
        on_lanes: Mapping[Kind, Sequence[StreamCallback]] = {
            kind: [
                issue(lane, transport.sending(kind, call))
                for lane, transport, call in zip(
                    self._lane_of, self._transports, calls, strict=True
                )
            ]
            for kind, calls in callbacks.items()
            if program.has(kind)
        }
        try:
            failures = self._issuer.issue(self.core, self.gpus, program, on_lanes, traced=traced)
        finally:
            # The caller's streams wait for copies to the host that a REDUCE has begun.
            self.gpus.join_beside()
        if self._policy is not None and not failures:
            self._policy.learn(batch)
        return failures

    def _replay(
        self, recording: Recording, program: _C.StreamProgram, batch: Batch, *, traced: bool
    ) -> list[Failure]:
        recording.load(batch)
        callers = self.gpus.callers()
        with self.gpus.step():
            # Actions within one graph cannot be timed, so traced steps use a graph per action.
            if self._capture == "step" and not traced:
                self.core.run_whole(program, callers)
            else:
                self.core.run(program, {}, callers, replay=True, traced=traced)
        assert isinstance(batch.finish, Losses)
        recording.collect(batch.finish)
        return []

    def end(self) -> None:
        """Releases all objects of the step."""
        for transport in self._transports:
            if transport.is_open:
                transport.end()

    def timeline(self, program: Program, ago: int) -> Timeline:
        """The measured times of all actions in the last traced step; `ago` must be 0."""
        assert isinstance(program, _C.StreamProgram)
        if ago != 0:
            raise IndexError(
                f"ago must be 0 on GPUs, where the last traced step is kept, got {ago}"
            )
        self.core.settle()
        return program.timeline()

    def where(self, device: int) -> str:
        """The name of a device for messages."""
        return f"lane {device}"

    def close(self) -> None:
        """Waits for all work, then frees the memory of rings and graphs, and leaves the streams."""
        is_free = _wait(self.core, self.gpus, self._transports, self._policy)
        self._issuer.close()
        self._end.detach()
        self._policy = None
        if is_free:
            for transport in self._transports:
                transport.close()
            self.gpus.lanes.close()


# The rings and graphs of steps that have stalled, which GPUs may still use.
_leaked: list[object] = []


def _wait(core: _C.StreamExecutor, gpus: cuda.Gpus, *held: object) -> bool:
    """Waits for all work. Returns False if a step has stalled: what it uses is then kept."""
    is_free = core.close()
    if is_free:
        # After a fork or a lost context, no work is left to wait for.
        with suppress(RuntimeError):
            gpus.synchronize()
    else:
        _leaked.append((gpus, *held))
        warn(
            "a step has stalled on a GPU, so the pipeline's rings, graphs, streams and events are "
            "not freed before the process ends"
        )
    return is_free
