"""Data parallel: pipelines in several processes, each with batches of its own, train one model."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...notes import add_note
from ...plan import Kind, Timeline
from ...runtime.features.feature import Feature, Made, TrainingStep
from ...runtime.stage.stage import Stage
from ..peers.agreement import agreed_group, values_digest
from ..peers.errors import ErrorContext, PeerError, is_of_peers, shown
from ..peers.exchange import PeerMessage, exchange
from ..peers.groups import give_back, lane_groups, meeting, timeout_of
from ..peers.waiting import Pending
from .refusals import refuse_failures, refuse_main_grads, refuse_others
from .shares import Owners
from .sums import StepSums, sums_of


class _Phase(Enum):
    """Where a step is, as peers see it."""

    BEFORE = auto()  # they will hear from this process
    TELLING = auto()  # they may have heard
    WITHIN = auto()  # they wait for its sums, and will hear again
    OVER = auto()  # they have heard all


class DataParallel(Feature):
    """The sums over processes of a pipeline's gradients and losses.

    A stage's gradients are on their way when its REDUCE has run; they are waited for when the step
    has ended. A process whose step fails still takes part in what its peers wait for, and tells
    them, so that all of them can go on.

    What `.grad` holds before a step is the same in all processes, and counts once: the first
    process keeps it, the others begin with nothing. After a step within `no_sync` it is each one's
    own, and all keep it.

    Args:
        given: of processes that each have such a pipeline.
        model: what trains, by the user's names.

    Attributes:
        owners: whose gradient is whose.
    """

    def __init__(self, given: ProcessGroup, model: nn.Module) -> None:
        self._given = given
        self._model = model
        self._timeout = timeout_of(given)
        # Process groups made here; closing destroys them.
        self._own: list[ProcessGroup] = []
        self.owners = Owners(given.rank())
        self._turn = threading.Lock()
        self._lost = ""
        # Whether the last gradients, if there are any, are the same in all processes.
        self._summed = True
        self._local = False
        self._checked = False
        self._phase = _Phase.BEFORE
        # Of the last step.
        self._sums = StepSums({}, [])
        self._loss: Pending | None = None

    def attach(self, made: Made) -> None:
        """Meets the other processes; the plan has a REDUCE for each stage.

        Raises:
            PeerError: a process has something else, or has not come.
        """
        self._stages, self._plan = made.executor.stages, made.plan
        with meeting(self._given):
            self._control = agreed_group(self._given, made.told())
            self._own.append(self._control)
            self._groups = lane_groups(self._given, made.plan.num_devices)
            self._own += self._groups
        self._stage_groups = [self._groups[lane] for lane in made.plan.placement.replicas[0]]
        for stage in self._stages:
            stage.reductions.append(partial(self._launch, stage))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, gradients of steps stay those of this process."""
        before, self._local = self._local, True
        try:
            yield
        finally:
            self._local = before

    @property
    def group(self) -> ProcessGroup:
        """For collectives of the calling thread, between steps."""
        return self._groups[0]

    @property
    def control(self) -> ProcessGroup:
        """For what the host alone has to know; of the calling thread, between steps."""
        return self._control

    def step(self, scaler: object) -> AbstractContextManager[None]:
        """Around all of a step; what is raised within it is told to the peers.

        Raises:
            PeerError: peers were lost before.
            RuntimeError: another thread is within it.
        """
        del scaler
        self._require_peers()
        return ErrorContext(self._leave, self._enter)

    def talking(self) -> AbstractContextManager[None]:
        """Around collectives of the calling thread between steps, on `group` or `control`.

        Raises:
            PeerError: peers were lost before; or a collective finds that one is gone, or has not
                come in time.
        """
        self._require_peers()
        return ErrorContext(self._hear)

    def _hear(self, error: BaseException | None) -> None:
        if error is not None and is_of_peers(error):
            raise self._lose(error) from error

    def _require_peers(self) -> None:
        if self._lost:
            raise PeerError(
                f"this pipeline has lost its peers: {self._lost}; make the process group and the "
                "pipeline again, in every process"
            )

    def _enter(self) -> None:
        if not self._turn.acquire(blocking=False):
            raise RuntimeError("the pipeline is running a step in another thread")
        self._phase, self._loss = _Phase.BEFORE, None

    def _leave(self, error: BaseException | None) -> None:
        try:
            if error is not None:
                self._fail(error)
        finally:
            self._turn.release()

    def begin(self, step: TrainingStep) -> None:
        """Begins a step together with the peers, by the rows of all of whom losses count.

        Raises:
            ValueError: a parameter collects gradients where they are not summed.
            PeerError: a peer has failed, does something else, is gone, or has not come in time.
        """
        self.owners.require_scaler(step.scaler)
        refuse_main_grads(self._model)
        message = PeerMessage(sum(step.rows), self._digest(), self._local)
        said = self._exchange(message, _Phase.OVER)
        refuse_failures(said, "before its step", "none has changed anything")
        refuse_others(said, message)
        self._checked = True
        if self._summed:
            self.owners.keep_once(self._model.parameters())
        # What stages share is the last that the first device's group gets.
        shared_by = None if self._local else self._groups[0]
        self._sums = sums_of(self._stages, self._stage_groups, shared_by, self.owners)
        self._phase = _Phase.WITHIN
        step.total = sum(other.rows for other in said)

    def _digest(self) -> int:
        """Of which parameters train, and in the first step, of what all of them hold."""
        trains = bytes(parameter.requires_grad for parameter in self._model.parameters())
        digest = zlib.crc32(trains)
        if not self._checked:
            model = self._model
            digest ^= values_digest((*model.named_parameters(), *model.named_buffers()))
        return digest

    def _launch(self, stage: Stage) -> None:
        if not self._local:
            self._sums.of_stage[stage.index].launch()

    def finish(self, loss: Tensor) -> Tensor:
        """Waits for the sums of a step that has succeeded.

        Args:
            loss: this process's part of it: [].

        Returns:
            The loss of all processes' batches: [].

        Raises:
            PeerError: a peer has failed, is gone, or has not come in time.
        """
        for gradients in self._sums.shared:
            gradients.launch()
        total = self._end(loss)
        said = self._exchange(PeerMessage(), _Phase.OVER)
        refuse_failures(said, "in this step", "its gradients are undefined in all processes")
        for gradients in self._sums:
            gradients.finish()
        self._summed = not self._local
        return total

    def _end(self, loss: Tensor) -> Tensor:
        """The sum of losses, when everything that was launched is there."""
        total = loss.clone()
        try:
            if self._loss is None:
                work = dist.all_reduce(total, group=self._stage_groups[-1], async_op=True)
                self._loss = Pending(work, on_host=total.device.type == "cpu")
            for gradients in self._sums:
                gradients.wait()
            self._loss.wait()
        except RuntimeError as error:
            raise self._lose(error) from error
        return total

    def _exchange(self, message: PeerMessage, then: _Phase) -> list[PeerMessage]:
        # What is interrupted from here on, peers may have heard or not.
        self._phase = _Phase.TELLING
        try:
            said = exchange(message, self._control)
        except RuntimeError as error:
            raise self._lose(error) from error
        self._phase = then
        return said

    def _fail(self, error: BaseException) -> None:
        """Tells the peers, and takes part in what they wait for."""
        if self._lost or self._phase is _Phase.OVER:
            return
        if self._phase is _Phase.TELLING:
            self._lose(error)
            return
        try:
            if self._phase is _Phase.WITHIN:
                self._complete()
            self._exchange(PeerMessage(failure=shown(error)), _Phase.OVER)
        except BaseException as other:
            # An interrupt, perhaps, of who does not want to wait for peers that hang.
            if not self._lost:
                self._lose(other)
            add_note(error, f"the peers could not be told: {shown(other)}")

    def _complete(self) -> None:
        for row in self._plan.rows:
            for action in row:
                if action.kind is Kind.REDUCE and not self._local:
                    self._sums.of_stage[action.stage].complete()
        for gradients in self._sums.shared:
            gradients.complete()
        self._summed = True
        self._end(torch.zeros((), device=self._stages[-1].device))

    def _lose(self, error: BaseException) -> PeerError:
        """From now on there is nobody to talk to; who waits for this process sees it leave."""
        self._lost = shown(error)
        self.close()
        seconds = self._timeout.total_seconds()
        return PeerError(
            f"a process of the group is gone, or has not come within {seconds:g} s: {self._lost}"
        )

    def reductions(self, timeline: Timeline) -> Timeline:
        """When the gradients of each stage were on their way in the last step.

        Args:
            timeline: of that step.

        Returns:
            A row for each device, in the time of the timeline; no rows after a step within
            `no_sync`, or on GPUs, where the host does not know.
        """
        return self._sums.timeline(timeline)

    def close(self) -> None:
        """Gives the groups back."""
        self._lost = self._lost or "it was closed"
        give_back(self._own)
