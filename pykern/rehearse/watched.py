"""A pipeline of a rehearsed script: its steps run on CPU workers, and are looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ..pipeline.build import Built, Design
from ..pipeline.profiled import tokens_of_row
from ..pipeline.request import Request
from ..plan import Kind, Plan
from ..runtime.batch import Batch, Outputs
from ..runtime.devices import Device
from ..runtime.driver import Program
from ..runtime.features.feature import Feature, Made
from ..runtime.gpu.capture.refusals import (
    CannotCapture,
    refuse_batch,
    refuse_loss,
    refuse_plan,
    refuse_stage,
)
from ..runtime.stage.stage import Run, Stage
from ..script import ScriptEnds
from ..tensors.trees import all_tensors
from .host_waits import HostWait
from .memory import Fit, fit_of
from .operation_times import OperationTimes
from .setting import Setting


def on_workers(asked: Request) -> Request:
    """The request with a CPU worker for each GPU."""
    workers = [Device("cpu", speed=lane.speed) for lane in asked.lanes]
    return replace(asked, devices=workers, capture=False, issue="caller")


class Watched(Feature):
    """Looks at the steps of a pipeline, the first one more closely.

    Args:
        asked: what the script asks for, with GPUs.
        of: what runs, with workers.
        model: the pipeline, whose tensors are on GPUs.
        at: the rehearsal.

    Attributes:
        plan: of its training steps.
        losses: of its steps.
        rows: of its batch.
        tokens: of a row; None if rows are not rows of integers.
        fit: the memory of its first step; None before.
        times: of actions, in nanoseconds, by kind and stage; empty where the box does not tell its
            rates.
        obstacles: to a capture, but for waits.
        waits: of the host in actions, each a reason against a capture too.
    """

    plan: Plan

    def __init__(self, asked: Request, of: Design, model: Any, at: Setting) -> None:
        self.asked, self.model, self._of, self._at = asked, model, of, at
        self.losses: list[float] = []
        self.rows = 0
        self.tokens: int | None = None
        self.fit: Fit | None = None
        self.obstacles: Sequence[str] = ()
        self.waits: Sequence[str] = ()
        self.times: Mapping[tuple[Kind, int], list[float]] = {}
        self._is_timed = False

    def attach(self, made: Made) -> None:
        """Becomes the runner of its steps."""
        super().attach(made)
        assert isinstance(made, Built)
        self._made, self._runner, made.runner = made, made.runner, self
        self.plan = made.plan
        self._at.mode.put([*self.model.parameters(), *self.model.buffers()])

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """The call, as one of an action."""
        return partial(self._act, kind, stage.index, call)

    def predict(self, program: Program, batch: Batch, outputs: Outputs) -> Any:
        """Runs a forward."""
        with self._at.waits.step():
            output = self._runner.predict(program, batch, outputs)
        self._at.mode.put(all_tensors(output))
        return output

    def run(self, program: Program, batch: Batch, result: Callable[[], Any]) -> Any:
        """Runs a step, unless it is one too many, or would not fit."""
        is_first, before = not self.losses, Counter(self._at.waits.found)
        if len(self.losses) == self._at.num_steps:
            raise ScriptEnds
        if is_first:
            self._begin(batch)
        try:
            with self._at.waits.step():
                loss = self._runner.run(program, batch, result)
        finally:
            self._is_timed = False
            self._note(self._at.waits.found - before)
        self._at.mode.put([loss])
        with self._at.mode.paused():
            self.losses.append(float(loss))
            if is_first:
                stages = self._made.executor.stages
                self.obstacles = [*_against_capture(self.plan, stages, batch)]
        return loss

    def _note(self, waits: Mapping[HostWait, int]) -> None:
        texts = (
            f"{one.action}: the host waits for a GPU at {one.line}, by {one.call}"
            for one in sorted(waits)
            if one.action
        )
        self.waits = list(dict.fromkeys([*self.waits, *texts]))

    def _begin(self, batch: Batch) -> None:
        """Before the first step: its memory, and whose times are taken."""
        # Layers of a trial may name GPUs, so the mode stays on.
        with self._at.waits.trial():
            self.fit = fit_of(self.asked, self._of, self._made, batch, self._at)
        if self.fit.fits is False:
            raise ScriptEnds
        *call, _ = batch.given
        self.rows, self.tokens = sum(batch.rows), tokens_of_row(call)
        self._is_timed = all(
            device.flops_per_ns and device.memory_bytes_per_ns for device in self._at.box.devices
        )
        if self._is_timed:
            stages = range(self.plan.num_stages)
            self.times = {(kind, stage): [] for kind in Kind for stage in stages}

    def _act(self, kind: Kind, stage: int, call: Run, microbatch: int) -> None:
        with self._at.waits.action(kind, stage):
            if not self._is_timed:
                call(microbatch)
                return
            lane = self.asked.lanes[self.plan.placement.device_of(stage)]
            num_lanes = [one.device for one in self.asked.lanes].count(lane.device)
            with OperationTimes(self._at.box.devices[lane.device.index], num_lanes) as times:
                call(microbatch)
            self.times[kind, stage].append(times.ns)


def _against_capture(plan: Plan, stages: Sequence[Stage], batch: Batch) -> Iterator[str]:
    """The reasons to refuse a capture of this step, which has run; one for each stage."""
    of_stages = [partial(refuse_stage, stage) for stage in stages]
    for refuse in (
        partial(refuse_plan, plan),
        *of_stages,
        partial(refuse_loss, batch),
        partial(refuse_batch, batch),
    ):
        try:
            refuse()
        except CannotCapture as error:
            yield str(error)
