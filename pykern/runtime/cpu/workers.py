"""The CPU driver: one worker thread per device."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ... import _C
from ...plan import Action, Plan, Timeline
from ...plan.halves import backward_half
from ...plan.parts import PlanPart
from ...torch_private import compiler
from ...trace.routes import Direct, everywhere
from ..batch import Batch
from ..caller_state import CallerState
from ..driver import Callbacks, Failure, Located, Program
from ..failures import place_of
from ..host_memory import OneMemory
from ..profiled import follow_profiler
from ..settings_kept import settings_kept
from ..stage.stage import Stage
from ..timeout import PipelineStalled
from .freed_memory import keep_freed_memory
from .stream import WorkerFlow

# An action and its device.
DeviceAction = tuple[Action, int]
# Names an action and its device, for a message.
Where = Callable[[Action, int], str]


class Workers:
    """Runs plans on worker threads, one for each device; short steps of one on the caller's.

    Args:
        num_devices: number of worker threads.
        timeout: the longest time of an action, in seconds; None for no limit.
    """

    captures = False

    def __init__(self, num_devices: int, timeout: float | None = None) -> None:
        keep_freed_memory()
        self.num_devices = num_devices
        self.core = _C.WorkerExecutor(num_devices, timeout or 0.0)
        self.claim = self.core.claim

    def ready(self) -> None:
        """Does nothing: a step that stalls raises its error itself."""

    def direct(self, _: Plan) -> Direct:
        """A function that tells that values can go past the stages between any two stages."""
        return everywhere

    def connect(self, replicas: Sequence[Sequence[Stage]], plan: Plan) -> None:
        """Does nothing: stages that share one memory are connected already."""

    def host_link(self, _: int) -> OneMemory:
        """The link to the host, where the tensors are already."""
        return OneMemory()

    def transfer_bytes(self, _: int) -> int:
        """0: workers read what other workers have made where it is."""
        return 0

    def program(self, plan: Plan) -> _C.WorkerProgram:
        """The plan as a program of this driver."""
        return _C.WorkerProgram(plan)

    def halves(self, plan: Plan) -> tuple[_C.WorkerProgram, _C.WorkerProgram]:
        """A program of the plan's forwards, and one of its other actions, to run after them."""
        return self.program(plan.forward_only()), self.part(backward_half(plan))

    def part(self, part: PlanPart) -> _C.WorkerProgram:
        """A program of a part of a plan; actions before the part count as done."""
        return _C.WorkerProgram.part(part.plan, part.begins, part.ends)

    def device(self, _: int) -> torch.device:
        """The torch device that holds the tensors of a device of the plan."""
        return torch.device("cpu")

    def run(
        self, program: Program, callbacks: Callbacks, batch: Batch, *, traced: bool
    ) -> list[Failure]:
        """Runs a step for the holder of the claim; returns the failures, earliest first.

        `traced` and `batch` are unused: workers always trace, and the stages hold the batch.
        """
        del batch, traced
        assert isinstance(program, _C.WorkerProgram)
        follow_profiler()
        caller = CallerState(self.num_devices)
        # Autocast keeps cast weights for as long as it is in force on a thread, and a compiler
        # compiles all code there. On a worker neither outlasts the step.
        if caller.has_grad_alone and compiler() is None and self.core.is_short(program):
            return self.core.run_short(program, callbacks)
        run = partial(self.core.run, program, callbacks, caller, None, _STALLED)
        with _C.Undo(caller.restore_threads):
            return run() if self.num_devices == 1 else settings_kept(run)

    def run_flow(self, flow: WorkerFlow, callbacks: Callbacks) -> list[Failure]:
        """Runs the batches that the flow is fed; returns the failures. The caller has the claim."""
        follow_profiler()
        told = partial(_stalled, partial(_where, flow.located))
        return self.core.run(flow.program, callbacks, flow.carry, flow.begun, told)

    def end(self) -> None:
        """Does nothing: workers keep no object of the step."""

    def timeline(self, program: Program, ago: int) -> Timeline:
        """The measured times of all actions, `ago` steps before the last one."""
        assert isinstance(program, _C.WorkerProgram)
        return program.timeline(ago)

    def where(self, device: int) -> str:
        """The name of a device for messages."""
        return f"the worker of device {device}"

    def close(self) -> None:
        """Ends the threads. A step in progress in another thread is stopped first."""
        self.core.close()


def _stalled(
    where: Where,
    acting: Sequence[tuple[DeviceAction, float, int]],
    rows: Sequence[tuple[DeviceAction, Sequence[DeviceAction]]],
) -> PipelineStalled:
    """The exception for a step.

    Args:
        where: names an action.
        acting: actions that have not ended, each with its seconds and its worker's thread.
        rows: the next action of each device that waits, and the inputs that have not run.
    """
    if not acting:
        return PipelineStalled("the step was abandoned; the pipeline is closed")
    (place, seconds, _), *_ = acting
    lines = [f"{where(*place)} has not ended for {seconds:.1f} s; the pipeline is closed"]
    frames = sys._current_frames()
    for place, seconds, thread in acting:
        lines.append(f"device {place[1]} is in {where(*place)} for {seconds:.1f} s:")
        frame = frames.get(thread)
        lines += [] if frame is None else "".join(traceback.format_stack(frame)).splitlines()
    for (action, device), inputs in rows:
        missing = ", ".join(f"{one} of device {of}" for one, of in inputs)
        lines.append(f"device {device} waits for {missing or 'a worker'}, to go on with {action}")
    return PipelineStalled("\n".join(lines))


def _where(located: Located | None, action: Action, device: int) -> str:
    action, batch = located(action) if located is not None else (action, "")
    return place_of(action, device, batch)


# For steps, whose microbatches are all of one batch.
_STALLED = partial(_stalled, partial(_where, None))
