"""The CPU driver: one worker thread per device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ... import _C
from ...plan import Action, Plan, Timeline
from ...plan.halves import backward_half
from ...plan.parts import PlanPart
from ...trace.routes import Direct, everywhere
from ..batch import Batch
from ..caller_state import CallerState
from ..driver import Callbacks, Failure, Located, Program
from ..host_memory import OneMemory
from ..stage.stage import Stage
from .stalled import stalled
from .stream import WorkerFlow


class Workers:
    """Runs plans on worker threads, one for each device.

    Args:
        num_devices: how many.
        timeout: for how many seconds an action may go on; None for any time.
    """

    captures = False

    def __init__(self, num_devices: int, timeout: float | None = None) -> None:
        self.num_devices = num_devices
        self.claim = _C.WorkerExecutor(num_devices, timeout or 0.0)

    def direct(self, _: Plan) -> Direct:
        """Where a value can go from a stage to a later one past those between: everywhere."""
        return everywhere

    def connect(self, replicas: Sequence[Sequence[Stage]], plan: Plan) -> None:
        """Lets stages reach their neighbours: in one memory they do."""

    def host_link(self, _: int) -> OneMemory:
        """How tensors of a device of the plan get to the host and back: they are there."""
        return OneMemory()

    def program(self, plan: Plan) -> _C.WorkerProgram:
        """The plan, ready to run."""
        return _C.WorkerProgram(plan)

    def halves(self, plan: Plan) -> tuple[_C.WorkerProgram, _C.WorkerProgram]:
        """The forwards of a plan, and a program of its other actions, which runs behind them."""
        return self.program(plan.forward_only()), self.part(backward_half(plan))

    def part(self, part: PlanPart) -> _C.WorkerProgram:
        """A part of a plan, ready to run; what stands before it counts as done."""
        return _C.WorkerProgram.part(part.plan, part.begins, part.ends)

    def device(self, _: int) -> torch.device:
        """Where a device of the plan has its tensors."""
        return torch.device("cpu")

    def run(
        self, program: Program, callbacks: Callbacks, batch: Batch, *, traced: bool
    ) -> list[Failure]:
        """Runs a step for whoever has the claim; returns what failed, first things first.

        It is traced anyway, and the stages have the batch.
        """
        del batch, traced
        assert isinstance(program, _C.WorkerProgram)
        caller = CallerState(self.num_devices)
        with _C.Undo(caller.restore_threads):
            return self.claim.run(program, callbacks, caller, None, _stalled)

    def run_flow(self, flow: WorkerFlow, callbacks: Callbacks) -> list[Failure]:
        """Runs what the flow is fed, for whoever has the claim; returns what failed."""
        told = partial(stalled, partial(_where, flow.located))
        return self.claim.run(flow.program, callbacks, flow.carry, flow.begun, told)

    def end(self) -> None:
        """Lets go of everything that belongs to the step."""

    def timeline(self, program: Program, ago: int) -> Timeline:
        """What ran when, `ago` steps before the last one."""
        assert isinstance(program, _C.WorkerProgram)
        return program.timeline(ago)

    def where(self, device: int) -> str:
        """What a device is called in a message."""
        return f"the worker of device {device}"

    def close(self) -> None:
        """Ends the threads. A step in progress in another thread is stopped first."""
        self.claim.close()


def _where(located: Located | None, action: Action, device: int) -> str:
    batch = ""
    if located is not None:
        action, batch = located(action)
    of_batch = f" of {batch}" if batch else ""
    return (
        f"stage {action.stage}, microbatch {action.microbatch}{of_batch}, action {action}, "
        f"device {device}"
    )


_stalled = partial(stalled, partial(_where, None))
