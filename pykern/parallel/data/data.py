"""Data parallel: pipelines in several processes, each with batches of its own, train one model."""

from __future__ import annotations

import threading
import zlib
from contextlib import AbstractContextManager
from enum import Enum, auto
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...attributes import replaced
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
    """The phase of a step, as the peers see it."""

    BEFORE = auto()  # the peers will hear from this process
    TELLING = auto()  # the peers may have heard from this process
    WITHIN = auto()  # the peers wait for this process's sums, and will hear from it again
    OVER = auto()  # the peers have heard everything


class DataParallel(Feature):
    """The sums over processes of a pipeline's gradients and losses.

    A stage's REDUCE launches the all-reduce of its gradients; the end of the step waits for it. A
    process whose step fails still takes part in the collectives that its peers wait for, and tells
    its peers, so that all of them can go on.

    The `.grad` before a step is the same in all processes, and counts once: the first process keeps
    its `.grad`, the others drop theirs. After a step within `no_sync` each process has gradients of
    its own, and all processes keep them.

    Args:
        given: group of the processes, each with a pipeline of the same model.
        model: the trained model, with the user's parameter names.

    Attributes:
        model: as given.
        owners: the process that owns each gradient's sum.
    """

    def __init__(self, given: ProcessGroup, model: nn.Module) -> None:
        self._given = given
        self.model = model
        self._timeout = timeout_of(given)
        # Process groups made here; closing destroys them.
        self._own: list[ProcessGroup] = []
        self.owners = Owners(given)
        self._turn = threading.Lock()
        self._lost = ""
        # Whether the last gradients, if there are any, are the same in all processes.
        self._summed = True
        self._local = False
        self._checked = False
        self._phase = _Phase.BEFORE
        # The sums and the loss of the last step.
        self._sums = StepSums({}, [])
        self._loss: Pending | None = None

    def attach(self, made: Made) -> None:
        """Meets the other processes; the plan has a REDUCE for each stage.

        Raises:
            PeerError: a process has another plan or model, or has not come.
        """
        self._stages, self._plan = made.executor.stages, made.plan
        with meeting(self._given):
            self._control = agreed_group(self._given, made.told())
            self._own.append(self._control)
            self._groups = lane_groups(self._given, made.plan.num_devices)
            self._own += self._groups
            # A process that closed its pipeline now would cut others off that still make theirs.
            dist.barrier(self._control)
        self._stage_groups = [self._groups[lane] for lane in made.plan.placement.replicas[0]]
        for stage in self._stages:
            stage.reductions.append(partial(self._launch, stage))

    def no_sync(self) -> AbstractContextManager[None]:
        """Steps within this context leave each process its own gradients, without all-reduce."""
        return replaced(self, "_local", True)

    @property
    def has_own_gradients(self) -> bool:
        """Whether there are gradients, and each process has its own."""
        return not self._summed and any(p.grad is not None for p in self.model.parameters())

    @property
    def group(self) -> ProcessGroup:
        """The group for collectives of the calling thread between steps."""
        return self._groups[0]

    @property
    def control(self) -> ProcessGroup:
        """The gloo group for host-only data, for the calling thread between steps."""
        return self._control

    def step(self, scaler: object) -> AbstractContextManager[None]:
        """The context around a whole step; it tells the peers about exceptions raised within.

        Raises:
            PeerError: peers were lost before.
            RuntimeError: another thread is running a step.
        """
        del scaler
        self._require_peers()
        return ErrorContext(self._leave, self._enter)

    def talking(self) -> AbstractContextManager[None]:
        """The context around the caller's collectives on `group` or `control`, between steps.

        Raises:
            PeerError: peers were lost before; or a collective finds that a peer is gone, or has not
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
                f"this pipeline has lost its peers: {self._lost}. Make the process group and the "
                "pipeline again, in every process"
            )

    def _enter(self) -> None:
        if not self._turn.acquire(blocking=False):
            raise RuntimeError(
                "the pipeline is running a step in another thread. Wait for that step, or make "
                "another pipeline"
            )
        self._phase, self._loss = _Phase.BEFORE, None

    def _leave(self, error: BaseException | None) -> None:
        try:
            if error is not None:
                self._fail(error)
        finally:
            self._turn.release()

    def begin(self, step: TrainingStep) -> None:
        """Begins a step together with the peers; the rows of all peers weight the losses.

        Raises:
            ValueError: a parameter has a `main_grad`, which is not summed.
            PeerError: a peer has failed, does something else, is gone, or has not come in time.
        """
        self.owners.require_scaler(step.scaler)
        refuse_main_grads(self.model)
        # On a GPU the host waits for the scale no longer than it has waited in `scaler.step`.
        scale = 1.0 if step.scale is None else float(step.scale)
        message = PeerMessage(sum(step.rows), self._digest(), self._local, scale)
        said = self._exchange(message, _Phase.OVER)
        refuse_failures(said, "before its step", "none has changed anything")
        refuse_others(said, message)
        self._checked = True
        if self._summed:
            self.owners.keep_once(self.model.parameters())
        # Parameters that stages share are the last ones that the first device's group sums.
        shared_by = None if self._local else self._groups[0]
        self._sums = sums_of(self._stages, self._stage_groups, shared_by, self.owners)
        self._phase = _Phase.WITHIN
        step.total = sum(other.rows for other in said)

    def _digest(self) -> int:
        """A digest of which parameters train; in the first step, of the model's values as well."""
        trains = bytes(parameter.requires_grad for parameter in self.model.parameters())
        digest = zlib.crc32(trains)
        if not self._checked:
            model = self.model
            digest ^= values_digest((*model.named_parameters(), *model.named_buffers()))
        return digest

    def _launch(self, stage: Stage) -> None:
        if not self._local:
            self._sums.of_stage[stage.index].launch()

    def finish(self, loss: Tensor) -> Tensor:
        """Waits for the sums of a step that has succeeded.

        Args:
            loss: this process's part of the loss: [].

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
        """The sum of losses, after waiting for all launched collectives."""
        # A process that has failed does not know the dtype of its peers' losses.
        total = loss.to(torch.float64, copy=True)
        try:
            if self._loss is None:
                work = dist.all_reduce(total, group=self._stage_groups[-1], async_op=True)
                self._loss = Pending(work, on_host=total.device.type == "cpu")
            for gradients in self._sums:
                gradients.wait()
            self._loss.wait()
        except RuntimeError as error:
            raise self._lose(error) from error
        return total.to(loss.dtype)

    def _exchange(self, message: PeerMessage, then: _Phase) -> list[PeerMessage]:
        # If the exchange is interrupted from here on, the peers may have heard the message or not.
        self._phase = _Phase.TELLING
        try:
            said = exchange(message, self._control)
        except RuntimeError as error:
            raise self._lose(error) from error
        self._phase = then
        return said

    def _fail(self, error: BaseException) -> None:
        """Tells the peers about the error, and takes part in the collectives they wait for."""
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
            # The exception may be the interrupt of a user who does not wait for hanging peers.
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
        """Gives up the peers for good; peers that wait for this process see it leave."""
        self._lost = shown(error)
        self.close()
        seconds = self._timeout.total_seconds()
        return PeerError(
            f"a process of the group is gone, or has not come within {seconds:g} s: {self._lost}"
        )

    def reductions(self, timeline: Timeline) -> Timeline:
        """The spans of the last step's all-reduces, by stage.

        Args:
            timeline: the timeline of that step.

        Returns:
            A row for each device, in the time of the timeline; no rows after a step within
            `no_sync`, or on GPUs, where the host cannot see when a collective runs.
        """
        return self._sums.timeline(timeline)

    def close(self) -> None:
        """Gives the groups back."""
        self._lost = self._lost or "it was closed"
        give_back(self._own)
