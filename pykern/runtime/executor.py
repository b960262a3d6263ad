"""Runs plans over stages: one step in, its results out, or the first error that happened in it."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from .. import _C
from ..notes import add_note, forget_notes, shown
from ..plan import Action, Kind, Plan, Timeline
from ..tensors.trees import Call
from .batch import Batch, Outputs
from .cpu.stream import WorkerFlow
from .cpu.workers import Workers
from .devices import DeviceLane
from .driver import Driver, Failure, Located, Program
from .gpu.capture.policy import Capture
from .gpu.stream import GpuFlow
from .gpu.streams import Streams
from .host_memory import HostLink
from .in_order import InOrder
from .microbatch import to_device
from .observer import Observer
from .random.eager import StepSeed
from .stage.replica import Replica
from .stage.stage import Stage, connect
from .stage.ties import Ties
from .stream import Flow, OpenBatch

# Performs an action of one kind and stage for the microbatch of a number.
Run = Callable[[int], None]
# Gets an action's kind, its stage, and what would be called; returns what to call.
Around = Callable[[Kind, Stage, Run], Run]


def open_driver(
    lanes: Sequence[DeviceLane], capture: Capture, timeout: float | None = None
) -> Driver:
    """Who runs plans on these lanes.

    Args:
        lanes: the plan's devices.
        capture: as of a pipeline.
        timeout: seconds that an action may take; None for no limit.

    Raises:
        RuntimeError: the GPUs cannot be used.
    """
    if lanes[0].device.type != "cpu":
        return Streams(lanes, capture)
    return Workers(len(lanes), timeout)


# What comes of a step that has ended.
Result = Callable[[], Any]


def _nothing() -> None:
    """Of a step whose results are elsewhere."""


_open: weakref.WeakSet[Executor] = weakref.WeakSet()


# What stages can run.
KINDS = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.REDUCE)


class Executor:
    """The stages of a model with what runs them.

    A step ends in one of two ways: everything ran, or the first exception is raised, the same
    object that user code raised, with a note of where. Either way no user code runs any more, no
    tensor of the step is held, and the next step starts fresh.

    Args:
        stages: those of the first replica.
        plan: what the stages are for.
        devices: where each device of the plan has its tensors.
        driver: who runs the actions.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        plan: Plan,
        devices: Sequence[torch.device],
        driver: Driver,
    ) -> None:
        placement = plan.placement
        self._replicas: list[Sequence[Stage]] = [stages]
        for number in range(1, placement.num_replicas):
            homes = [devices[placement.device_of(stage.index, number)] for stage in stages]
            self._replicas.append(
                [Replica(stage, home) for stage, home in zip(stages, homes, strict=True)]
            )
        for replica in self._replicas:
            connect(replica)
        self._stages = [stage for replica in self._replicas for stage in replica]
        self._callbacks: dict[Kind, list[Callable[[int], None]]] = {
            Kind.F: [stage.forward for stage in self._stages],
            Kind.R: [stage.recompute for stage in self._stages],
            Kind.B: [stage.backward for stage in self._stages],
            Kind.I: [stage.input_gradients for stage in self._stages],
            Kind.W: [stage.weight_gradients for stage in self._stages],
            Kind.REDUCE: [stage.reduce for stage in self._stages],
        }
        self._ties = Ties(stages)
        self._driver = driver
        self._observers: list[Observer] = []
        # Marks the notes that this executor adds.
        self._told = object()
        self._plan = plan
        # The last one that there was.
        self._flow: Callable[[], Flow | None] = lambda: None
        # Whether steps are timed where that is not free.
        self.traced = False
        driver.connect(self._replicas, plan)
        _open.add(self)

    def observe(self, observer: Observer) -> None:
        """Notifies the observer of every step from now on."""
        self._observers.append(observer)

    def watch(self, around: Around) -> None:
        """From now on, calls for each action what `around` gives for its call.

        Args:
            around: asked once for every kind and stage.
        """
        for kind, calls in self._callbacks.items():
            pairs = zip(self._stages, calls, strict=True)
            self._callbacks[kind] = [around(kind, stage, call) for stage, call in pairs]

    @property
    def stages(self) -> Sequence[Stage]:
        """Those of the first replica, which have the parameters."""
        return self._replicas[0]

    @property
    def in_one_memory(self) -> bool:
        """Whether what one action has written all others may read: not so on streams of GPUs."""
        return not isinstance(self._driver, Streams)

    @property
    def captures(self) -> bool:
        """Whether steps may be replayed without Python."""
        return self._driver.captures

    def host_link(self, stage: Stage) -> HostLink:
        """How parameters of a stage, and their gradients, get to the host and back."""
        device = self._plan.placement.device_of(stage.index)
        return self._driver.host_link(device)

    def program(self, plan: Plan) -> Program:
        """A plan over these stages, ready to run."""
        return self._driver.program(plan)

    def place(self, inputs: Call, target: Any) -> tuple[Call, Any]:
        """A batch where it is used; with replicas, each takes its microbatches of it."""
        first, last = self._replicas[0][0].device, self._replicas[0][-1].device
        if first.type == "cpu" or len(self._replicas) > 1:
            return inputs, target
        return to_device(inputs, first), to_device(target, last)

    def place_targets(self, targets: Sequence[Any]) -> Sequence[Any]:
        """Those of all microbatches, where their losses are computed.

        Before any action: a copy between GPUs within one would have both of their lanes wait.
        """
        ends = [replica[-1].device for replica in self._replicas]
        if ends[0].type == "cpu" or len(ends) == 1:
            return targets
        return [to_device(each, ends[m % len(ends)]) for m, each in enumerate(targets)]

    @property
    def end(self) -> torch.device:
        """Where the last stage has its tensors; with replicas, that of the first."""
        return self._replicas[0][-1].device

    def timeline(self, program: Program, ago: int) -> Timeline:
        """What ran when in a step of the program, `ago` steps before the last one."""
        return self._driver.timeline(program, ago)

    def copies(self, program: Program) -> Timeline:
        """When the program's copies ran in its last traced step; none where nothing is copied."""
        return Timeline([]) if isinstance(program, _C.WorkerProgram) else program.copies()

    def run(
        self,
        program: Program,
        batch: Batch,
        result: Result = _nothing,
        located: Located | None = None,
    ) -> Any:
        """Runs one step of a program over these stages; returns what `result` makes of it.

        Raises:
            RuntimeError: the executor is closed, running, streaming, or from before a fork.
            BaseException: the first exception that a stage raised, unchanged but for a note.
        """
        self._refuse_flow()
        return self._run(program, batch, result, located)

    def _run(
        self, program: Program, batch: Batch, result: Result, located: Located | None = None
    ) -> Any:
        # The end is called whatever happens here, also where an interrupt hits the end itself.
        with self._driver.claim, _C.Undo(self._end):
            self._begin(batch)
            # On CPUs `Workers` of C++ call these in the order of the plan's dependencies.
            failures = self._driver.run(program, self._callbacks, batch, traced=self.traced)
            if failures:
                raise self._first(failures, located)
            self._ties.finish()
            # Still in the step, for which closing waits: at exit the interpreter would end the
            # process if a thread came back from one of torch's functions after it has gone.
            found = result()
            for observer in self._observers:
                observer.succeed_run()
            return found

    def alone(self) -> AbstractContextManager[object]:
        """A context without other runs of the stages; raises RuntimeError as `run` does."""
        self._refuse_flow()
        return self._driver.claim

    def predict(
        self, program: Program, batch: Batch, outputs: Outputs, located: Located | None = None
    ) -> Any:
        """The outputs of a batch, whose `finish` they are."""
        with torch.no_grad():
            return self.run(program, batch, outputs.merged, located)

    def stream(self, program: Program, batches: Iterator[Call], open_batch: OpenBatch) -> InOrder:
        """What `predict` returns for each batch, in the order of the batches, which overlap.

        Random numbers come from the caller's generator, which the caller may use between two
        outputs. So layers that draw have their batches one by one, as in a loop; where that is not
        known, one batch tells.

        Args:
            program: for one batch.
            batches: the arguments of each, asked for in the thread that asks for outputs.
            open_batch: makes a batch of them.
        """

        def alone(call: Call, number: int) -> Any:
            return self.predict(program, *open_batch(call), _in_batch(number))

        return InOrder(batches, self._look, alone, partial(self._flow_from, program, open_batch))

    def settle(self) -> None:
        """Waits until no stage runs."""
        flow = self._flow()
        if flow is not None:
            flow.settle()

    def _look(self) -> None:
        """Has the stages see what has changed in their layers since the last step."""
        self._refuse_flow()
        with torch.no_grad(), self._driver.claim, _C.Undo(self._end):
            self._begin(Batch(((), {}), None, (), Outputs(())))

    def _flow_from(self, program: Program, open_batch: OpenBatch, first: int) -> Flow | None:
        """A flow for batches from number `first` on; None while batches have to run one by one."""
        self._refuse_flow()
        # Observers of steps have to see each batch as a step of its own.
        if self._observers or any(stage.draws.possible for stage in self._stages):
            return None
        driver, plan = self._driver, self._plan
        flow: Flow
        if isinstance(driver, Streams):

            def issue(batch: Batch, number: int) -> None:
                self._run(program, batch, _nothing, _in_batch(number))

            flow = GpuFlow(plan, open_batch, first, driver.gpus, issue)
        else:
            assert isinstance(driver, Workers)
            run = partial(self._run_flow, driver)
            flow = WorkerFlow(plan, open_batch, first, driver.claim, run)
        self._flow = weakref.ref(flow)
        return flow

    def _run_flow(self, driver: Workers, flow: WorkerFlow) -> None:
        with driver.claim, _C.Undo(self._end):
            self._begin(Batch(((), {}), None, [0] * flow.num_slots, flow.keep))
            # One list, so that whichever replica takes arguments lets go of them for all.
            for replica in self._replicas:
                replica[0].arguments = self._replicas[0][0].arguments
            flow.takers = [replica[0].take for replica in self._replicas]
            for stage in self._stages:
                stage.name(flow.keywords)
            failures = driver.run_flow(flow, self._callbacks)
            if failures:
                raise self._first(failures, flow.located)
            self._ties.finish()

    def _refuse_flow(self) -> None:
        flow = self._flow()
        if flow is not None and flow.is_open:
            raise RuntimeError(
                "the pipeline is streaming: take the outputs that are left, or close the stream"
            )

    def _begin(self, batch: Batch) -> None:
        for observer in self._observers:
            observer.begin_run()
        seed = StepSeed()
        for number, replica in enumerate(self._replicas):
            for stage in replica:
                levels = batch.levels[stage.index] if batch.levels else ()
                stage.begin(len(batch.rows), seed, batch.finish, levels)
            # Further replicas are of what the stages of the first run with.
            if number == 0:
                self._ties.begin()
            calls = self._calls_of(number, batch)
            replica[0].enter([None if call is None else call[0] for call in calls])
            keywords = [{} if call is None else call[1] for call in calls]
            if any(keywords):
                for stage in replica:
                    stage.enter_by_name(keywords)

    def _calls_of(self, number: int, batch: Batch) -> Sequence[Call | None]:
        """The calls of a batch that are for this replica; None for every other microbatch."""
        if len(self._replicas) == 1:
            return batch.calls
        turns = enumerate(batch.calls)
        return [call if m % len(self._replicas) == number else None for m, call in turns]

    def _end(self) -> None:
        """Releases the step's objects. May be called twice; the next step does not depend on it."""
        for stage in self._stages:
            stage.end()
        self._ties.end()
        self._driver.end()
        for observer in self._observers:
            observer.end_run()

    def close(self) -> None:
        """Ends what runs the actions, after a step in progress in another thread."""
        self._driver.close()

    def _first(self, failures: Sequence[Failure], located: Located | None = None) -> BaseException:
        """The exception that happened first, with notes of where and of what happened after it.

        Args:
            failures: as the driver gives them.
            located: see `Located`.
        """
        first = failures[0][2]
        for _, _, error in failures:
            forget_notes(error, self._told)
        for number, (action, device, error) in enumerate(failures):
            batch = ""
            if action is not None and located is not None:
                place, batch = located(action)
                where = self._where(place, device)
            else:
                where = self._where(action, device)
            if number > 0:
                add_note(first, f"{where} failed as well: {shown(error)}", self._told)
                continue
            if batch:
                add_note(first, f"raised in {batch}", self._told)
            if action is not None:
                add_note(first, f"raised in {where}", self._told)
        return first

    def _where(self, action: Action | None, device: int) -> str:
        if device < 0:
            return "a signal handler"
        if action is None:
            return f"{self._driver.where(device)}, outside its actions"
        cell = f"stage {action.stage}, microbatch {action.microbatch}"
        return f"{cell}, action {action}, device {device}"


def _in_batch(number: int) -> Located:
    return lambda action: (action, f"batch {number} of the stream")


@atexit.register
def _close_all() -> None:
    # Frees GPU memory too. The extension closes pipelines that later handlers open.
    for executor in list(_open):
        executor.close()
