"""Runs plans over stages. A step returns its result, or raises the first error in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from .. import _C
from ..plan import Kind, Plan, Timeline
from ..tensors.trees import Call
from .at_exit import close_at_exit
from .batch import Batch, Outputs, is_alike, values_of
from .cpu.stream import WorkerFlow
from .cpu.workers import Workers
from .driver import Driver, Located, Program
from .failures import Failures
from .gpu.stream import GpuFlow
from .gpu.streams import Streams
from .halfway import Halfway
from .in_order import InOrder
from .observer import Observer
from .random.seed import StepSeed
from .replicas import Replicas
from .stage import straight_tape
from .stage.stage import Run, Stage
from .stage.ties import Ties
from .stream import Flow, OpenBatch

# Wraps the call of an action: gets the kind, the stage and the call; returns the new call.
Around = Callable[[Kind, Stage, Run], Run]
# Computes the result of a step whose actions have run.
Result = Callable[[], Any]


class Executor:
    """The stages of a model, with the driver that runs them.

    A step ends in one of two ways: all actions ran, or the first exception is raised, the same
    object that user code raised, with a note of its place. Either way no user code runs any more,
    no tensor of the step is held, and the next step starts fresh.

    Args:
        stages: of the first replica.
        plan: the plan that the stages run.
        devices: the torch device that holds the tensors of each device of the plan.
        driver: runs the actions.

    Attributes:
        driver: makes programs of plans, runs their actions, and measures them.
        replicas: the stages of all replicas.
        stages: those of the first replica, which have the parameters.
        in_one_memory: whether all actions may read what one action has written; False on GPUs.
        ties: what stages share.
        overlaps: whether batches of a stream may overlap.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        plan: Plan,
        devices: Sequence[torch.device],
        driver: Driver,
    ) -> None:
        self.replicas = Replicas(stages, plan, devices, driver.ready)
        self.stages: Sequence[Stage] = self.replicas.each[0]
        self._stages = self.replicas.stages
        self._callbacks = self.replicas.actions()
        self.ties = Ties(stages)
        self.driver = driver
        self.in_one_memory = not isinstance(driver, Streams)
        self.overlaps = True
        self._observers: list[Observer] = []
        self._failures = Failures(driver.where)
        self._plan = plan
        # The last flow, if any.
        self._flow: Callable[[], Flow | None] = lambda: None
        # Whether steps are timed even where this costs time.
        self.traced = False
        driver.connect(self.replicas.each, plan)
        close_at_exit(self)

    def observe(self, observer: Observer) -> None:
        """Notifies the observer of every step from now on."""
        self._observers.append(observer)

    def watch(self, around: Around) -> None:
        """Wraps the call of each action in `around` from now on.

        Args:
            around: called once for every kind and stage.
        """
        for kind, calls in self._callbacks.items():
            pairs = zip(self._stages, calls, strict=True)
            self._callbacks[kind] = [around(kind, stage, call) for stage, call in pairs]

    def copies(self, program: Program) -> Timeline:
        """The measured times of the program's copies in its last traced step; empty on CPUs."""
        return Timeline([]) if isinstance(program, _C.WorkerProgram) else program.copies()

    def run(
        self,
        program: Program,
        batch: Batch,
        result: Result = lambda: None,
        located: Located | None = None,
    ) -> Any:
        """Runs one step of a program over these stages; returns the value of `result()`.

        Raises:
            RuntimeError: the executor is closed, running, streaming, or from before a fork.
            BaseException: the first exception that a stage raised, unchanged but for a note.
        """
        self._refuse_flow()
        with self.driver.claim():
            return self.run_claimed(program, batch, result, located)

    def run_claimed(
        self, program: Program, batch: Batch, result: Result, located: Located | None = None
    ) -> Any:
        """As `run`, for a caller within `alone`."""
        # `_end` runs whatever happens here, even if an interrupt comes during `_end` itself.
        with _C.Undo(self._end):
            self._begin(batch)
            self._act(program, batch, located)
            # The result is computed within the step, because closing waits for steps: the process
            # would abort if a thread returned from a torch function after the interpreter's exit.
            found = result()
            for observer in self._observers:
                observer.succeed_run()
            return found

    def _act(self, program: Program, batch: Batch, located: Located | None = None) -> None:
        """Runs the actions of a step that has begun."""
        actions = self.replicas.put_together(self._callbacks)
        # On CPUs, C++ `Workers` call these in the order of the plan's dependencies.
        failures = self.driver.run(program, actions, batch, traced=self.traced)
        self._failures.raise_first(failures, located)
        self.replicas.finish()
        self.ties.finish()

    def leave(self) -> Halfway:
        """Takes the state that a step of forwards leaves for backwards; called before its end."""
        return Halfway(self.stages, self.ties)

    def resume(self, program: Program, batch: Batch, left: Halfway) -> None:
        """Runs backwards from the state of their forwards, for a caller within `alone`.

        Args:
            program: of the backwards.
            batch: its `finish` has the gradients.
            left: the result of `leave`.

        Raises:
            RuntimeError, BaseException: as for `run`.
        """
        with _C.Undo(self._end):
            # R needs the same module settings as F, and observers may change them.
            for observer in self._observers:
                observer.begin_run()
            left.resume(batch)
            self._act(program, batch)

    def alone(self) -> AbstractContextManager[object]:
        """A context that excludes other runs. Raises RuntimeError as `run` does."""
        self._refuse_flow()
        return self.driver.claim()

    def predict(
        self, program: Program, batch: Batch, outputs: Outputs, located: Located | None = None
    ) -> Any:
        """The output of a batch, whose `finish` is `outputs`."""
        with torch.no_grad():
            return self.run(program, batch, outputs.merged, located)

    def stream(self, program: Program, batches: Iterator[Call], open_batch: OpenBatch) -> InOrder:
        """The result of `predict` for each batch, in their order; batches overlap.

        Random numbers come from the caller's generator, which the caller may use between two
        outputs. So if layers draw, batches run one by one, as in a loop. Where drawing is not
        known, the first batch shows it.

        Args:
            program: for one batch.
            batches: the arguments of each batch, fetched in the thread that takes outputs.
            open_batch: makes a batch from its arguments.
        """

        def alone(call: Call, number: int) -> Any:
            return self.predict(program, *open_batch(call), _in_batch(number))

        flow_from = partial(self._flow_from, program, open_batch)
        return InOrder(batches, self._look, alone, flow_from, partial(is_alike, self._stages[0]))

    def settle(self) -> None:
        """Waits until no stage runs."""
        flow = self._flow()
        if flow is not None:
            flow.settle()

    def _look(self) -> None:
        """Has the stages notice changes of their layers since the last step."""
        self._refuse_flow()
        with torch.no_grad(), self.driver.claim(), _C.Undo(self._end):
            self._begin(Batch(((), {}), None, (), Outputs(())))

    def _flow_from(self, program: Program, open_batch: OpenBatch, first: int) -> Flow | None:
        """A flow for batches from number `first` on; None while batches have to run one by one."""
        self._refuse_flow()
        # Observers must see each batch as a step of its own.
        apart = self._observers or not self.overlaps
        if apart or any(stage.draws.possible for stage in self._stages):
            return None
        driver, plan = self.driver, self._plan
        flow: Flow
        if isinstance(driver, Streams):

            def issue(batch: Batch, number: int) -> None:
                with driver.claim():
                    self.run_claimed(program, batch, lambda: None, _in_batch(number))

            flow = GpuFlow(plan, open_batch, first, driver.gpus, issue)
        else:
            assert isinstance(driver, Workers)
            flow = WorkerFlow(plan, open_batch, first, driver.core, partial(self._run_flow, driver))
        self._flow = weakref.ref(flow)
        return flow

    def _run_flow(self, driver: Workers, flow: WorkerFlow) -> None:
        with driver.claim(), _C.Undo(self._end):
            self._begin(Batch(((), {}), None, [0] * flow.num_slots, flow.keep))
            flow.takers = [replica[0].take for replica in self.replicas.each]
            for stage in self._stages:
                stage.name(flow.keywords)
            actions = self.replicas.put_together(self._callbacks)
            self._failures.raise_first(driver.run_flow(flow, actions), flow.located)
            self.replicas.finish()
            self.ties.finish()

    def _refuse_flow(self) -> None:
        flow = self._flow()
        if flow is not None and flow.is_open:
            raise RuntimeError(
                "the pipeline is streaming. Take the outputs that are left, or close the stream"
            )

    def _begin(self, batch: Batch) -> None:
        for observer in self._observers:
            observer.begin_run()
        seed = StepSeed()
        values = values_of(batch.inputs, batch.target) or self._stages[0].values
        for number, replica in enumerate(self.replicas.each):
            for stage in replica:
                levels = batch.levels[stage.index] if batch.levels else ()
                stage.values = values
                stage.begin(len(batch.rows), seed, batch.finish, levels)
            # Further replicas copy the layers that the first replica runs, which ties may replace.
            if number == 0:
                self.ties.begin()
            calls = self.replicas.share_of(number, batch.calls)
            straight_tape.enter(replica, [None if call is None else call[0] for call in calls])
            keywords = [call[1] if call else {} for call in (calls if batch.inputs[1] else ())]
            for stage in replica if any(keywords) else ():
                stage.enter_by_name(keywords)

    def _end(self) -> None:
        """Releases the step's objects. May be called twice; the next step works without it."""
        for stage in self._stages:
            stage.end()
        self.replicas.let_go()
        self.ties.end()
        self.driver.end()
        for observer in self._observers:
            observer.end_run()

    def close(self) -> None:
        """Ends the driver's threads, after a step in progress in another thread."""
        self.driver.close()


def _in_batch(number: int) -> Located:
    return lambda action: (action, f"batch {number} of the stream")
