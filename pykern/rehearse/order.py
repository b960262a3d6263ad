"""Issues a plan's steps for GPUs to the model of a driver, with stages that compute nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from .. import _C
from ..plan import Kind, Plan
from ..runtime.devices import DeviceLane
from ..runtime.gpu.ring_transport import RingTransport, StreamCallback
from ..runtime.gpu.rings import RingBuffers
from .driver_model import DriverModel, driver_model

if TYPE_CHECKING:
    from ..runtime.gpu.cuda import Gpus

# The second step uses again what the first has used.
_STEPS = 2
_FUNCTIONS = {
    "waits": "cuStreamWaitEvent",
    "records": "cuEventRecord",
    "copies": "cuMemcpyAsync",
}


@dataclass(frozen=True)
class Orders:
    """Steps of a plan as a driver gets them.

    Attributes:
        violations: works that touch the same bytes while nothing orders them, and wrong calls.
        calls: the number of waits, records and copies.
    """

    violations: Sequence[str]
    calls: Mapping[str, int]


def orders_of(plan: Plan, lanes: Sequence[DeviceLane], *, peers: bool) -> Orders:
    """The orders of two steps, from the code that issues steps to GPUs.

    Args:
        plan: of a step.
        lanes: the GPUs of its devices.
        peers: whether GPUs reach each other's memory; else copies go by way of the host.
    """
    num_gpus = 1 + max(lane.device.index for lane in lanes)
    with driver_model(num_gpus) as model:
        if not peers:
            model.separate(num_gpus)
        _StandIns(plan, lanes, model).run()
        calls = {name: model.calls(function) for name, function in _FUNCTIONS.items()}
        return Orders(model.violations, calls)


class _Host:
    """Takes the place of `Gpus`: the model's devices have the memory of the host."""

    def on_lane(self, lane: int, num_bytes: int) -> Tensor:
        del lane
        return self.pinned(num_bytes)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


class _StandIns:
    """Stages of a plan that hand on a byte each."""

    def __init__(self, plan: Plan, lanes: Sequence[DeviceLane], model: DriverModel) -> None:
        self.model = model
        self.lanes = _C.Lanes([(lane.device.index, lane.part, lane.num_parts) for lane in lanes])
        self._program = _C.StreamProgram(plan, self.lanes)
        self._plan = plan
        memory = cast("Gpus", _Host())
        self._stages: list[_StandInStage] = []
        for homes in plan.placement.replicas:
            rings = [RingBuffers(memory, lane) for lane in homes]
            transports: list[RingTransport] = []
            stages: list[_StandInStage] = []
            for stage, lane in enumerate(homes):
                transports.append(RingTransport(stage, rings, transports, self.lanes))
                stages.append(_StandInStage(self, stages, stage, lane, transports[-1]))
            self._stages += stages

    def run(self) -> None:
        """The caller writes the batch before each step; behind it, gradients become weights."""
        core = _C.StreamExecutor()
        gpus = {self.lanes.gpu_of(lane) for lane in range(len(self.lanes))}
        callers = {gpu: self.lanes.ring(gpu) for gpu in gpus}
        calls = {
            kind: [stage.sending(kind) for stage in self._stages]
            for kind in Kind
            if self._plan.has(kind)
        }
        for _ in range(_STEPS):
            self.model.begin_step()
            for stage in self._stages:
                stage.begin(self._program)
                caller = callers[self.lanes.gpu_of(stage.lane)]
                self.model.kernel(caller, [], [stage.batch])
            with core.claim():
                for _, _, error in core.run(
                    self._program, calls, callers, replay=False, traced=False
                ):
                    raise error
            for stage in self._stages:
                caller = callers[self.lanes.gpu_of(stage.lane)]
                self.model.kernel(caller, [stage.gradient], [stage.weight])
        core.close()
        self.model.run_all()
        self.lanes.close()


class _StandInStage:
    """A stage that tells the model what its actions would touch.

    Args:
        all_of: the step.
        stages: of the replica; the caller fills the list.
        index: the stage's number.
        lane: the stage's device.
        transport: the stage's way to its neighbours.
    """

    def __init__(
        self,
        all_of: _StandIns,
        stages: Sequence[_StandInStage],
        index: int,
        lane: int,
        transport: RingTransport,
    ) -> None:
        self.lane, self.batch, self.weight, self.gradient = lane, _byte(), _byte(), _byte()
        self._of, self._stages, self._index, self._transport = all_of, stages, index, transport
        self._stream = all_of.lanes.compute(lane)
        # By slot and direction, results that leave the stage: their memory serves the slot again.
        self._results: dict[tuple[int, Kind], Tensor] = {}
        # Results of neighbours, where they have arrived.
        self._arrived: dict[tuple[Kind, int], Sequence[Tensor]] = {}
        self._kept: dict[int, list[Tensor]] = {}
        # No address comes back, which only torch's allocator could order.
        self._alive: list[Tensor] = []

    def begin(self, program: _C.StreamProgram) -> None:
        """Starts a step."""
        self._slots = program.slots(self._index)
        self._transport.begin(program)
        self._arrived.clear()
        self._kept.clear()

    def sending(self, kind: Kind) -> StreamCallback:
        """The actions of a kind: what their kernels touch, and what they send."""
        return self._transport.sending(kind, partial(self._act, kind))

    def _act(self, kind: Kind, microbatch: int) -> None:
        if kind is Kind.F:
            self._forward(microbatch)
        elif kind in (Kind.B, Kind.I):
            self._backward(kind, microbatch)
        elif kind is Kind.R:
            self._touch(self._kept[microbatch], [self._new(microbatch)])
        elif kind is Kind.W:
            self._touch(self._kept.pop(microbatch), [self.gradient])
        else:
            self._touch([self.gradient], [])

    def _forward(self, microbatch: int) -> None:
        handed = self._arrived.get((Kind.F, microbatch), [self.batch])
        inputs = [*self._transport.arrive(handed)]
        self._alive += inputs
        self._kept[microbatch] = inputs
        result = self._result(Kind.F, microbatch)
        there = {tensor.data_ptr() for tensor in handed}
        copied = [one for one in inputs if one.data_ptr() not in there]
        self._touch([*handed, self.weight], [*copied, self._new(microbatch), result])
        after = self._index + 1
        if after < len(self._stages):
            sent = self._transport.there(microbatch, after, [result])
            self._stages[after]._arrived[Kind.F, microbatch] = sent

    def _backward(self, kind: Kind, microbatch: int) -> None:
        handed = self._arrived.get((Kind.B, microbatch), [])
        result = self._result(Kind.B, microbatch)
        reads, writes = [*self._kept[microbatch], *handed, self.weight], [result]
        if kind is Kind.I:
            writes.append(self._new(microbatch))
        else:
            del self._kept[microbatch]
            writes.append(self.gradient)
        self._touch(reads, writes)
        if self._index > 0:
            sent = self._transport.back(microbatch, self._index - 1, [result])
            placed = [one for one in sent if one is not None]
            self._stages[self._index - 1]._arrived[Kind.B, microbatch] = placed

    def _touch(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self._of.model.kernel(self._stream, reads, writes)

    def _new(self, microbatch: int) -> Tensor:
        """Memory that the microbatch keeps."""
        self._alive.append(_byte())
        self._kept[microbatch].append(self._alive[-1])
        return self._alive[-1]

    def _result(self, way: Kind, microbatch: int) -> Tensor:
        return self._results.setdefault((self._slots[microbatch], way), _byte())


def _byte() -> Tensor:
    return torch.zeros(1, dtype=torch.uint8)
