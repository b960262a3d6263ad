"""Data parallel: pipelines in several processes, each with batches of its own, train one model."""

from __future__ import annotations

import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...notes import add_note
from ...plan import Kind, Span, Timeline
from ...runtime.features.feature import Feature, Made, TrainingStep
from ...runtime.stage.layer_copies import trains
from ...runtime.stage.stage import Stage
from ..peers.agreement import agreed_group, values_digest
from ..peers.errors import ErrorContext, PeerError, is_of_peers, shown
from ..peers.exchange import PeerMessage, exchange
from ..peers.groups import give_back, lane_groups, meeting, timeout_of
from ..peers.waiting import Pending
from .buckets import GradientSum
from .shares import Owners


def refuse_foreign_loss(loss_fn: object, layers: Iterable[nn.Module]) -> None:
    """Refuses a loss with parameters of its own, whose gradients nobody would sum.

    Raises:
        ValueError: it trains what no layer has.
    """
    if trains(loss_fn, {parameter for layer in layers for parameter in layer.parameters()}):
        raise ValueError(
            "loss_fn trains parameters that the model does not have, and processes sum gradients "
            "of the model's alone: give them to the last layer"
        )


def _refuse_main_grads(model: nn.Module) -> None:
    """Raises ValueError where a parameter collects gradients in another place than `.grad`."""
    for name, parameter in model.named_parameters():
        if getattr(parameter, "main_grad", None) is not None:
            raise ValueError(
                f"{name} has a main_grad, and sums over process_group are of .grad: leave it out"
            )


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
        # Of the last step: by stage, then of what stages share.
        self._sums: dict[int, GradientSum] = {}
        self._late: list[GradientSum] = []
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
        placement = made.plan.placement
        self._lane_of = [placement.device_of(stage.index) for stage in self._stages]
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
        _refuse_main_grads(self._model)
        message = PeerMessage(sum(step.rows), self._digest(), self._local)
        said = self._exchange(message, _Phase.OVER)
        _refuse_failures(said, "before its step", "none has changed anything")
        for rank, other in enumerate(said):
            if other.is_local != self._local:
                ours, its = ("in", "out of") if self._local else ("out of", "in")
                raise PeerError(
                    f"this step is {ours} no_sync here and {its} it in process {rank} of the group"
                )
            if other.digest != message.digest:
                raise PeerError(
                    f"process {rank} of the group has other parameters or buffers than this one, "
                    "or trains others: load the same state, or seed all processes alike"
                )
        self._checked = True
        if self._summed:
            self.owners.keep_once(self._model.parameters())
        self._make_sums()
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

    def _make_sums(self) -> None:
        trained = [
            dict.fromkeys(p for layer in s.originals for p in layer.parameters() if p.requires_grad)
            for s in self._stages
        ]
        # What several stages use has its sum when the step has ended; it is the last that the
        # first device's group gets.
        uses = Counter(parameter for of_stage in trained for parameter in of_stage)
        self._sums = {
            stage.index: self.owners.sum_of(
                [parameter for parameter in of_stage if uses[parameter] == 1],
                self._groups[self._lane_of[stage.index]],
            )
            for stage, of_stage in zip(self._stages, trained, strict=True)
        }
        shared: dict[torch.device, list[Tensor]] = {}
        for parameter, count in uses.items():
            if count > 1 and not self._local:
                shared.setdefault(parameter.device, []).append(parameter)
        self._late = [
            self.owners.sum_of(of_device, self._groups[0]) for of_device in shared.values()
        ]

    def _launch(self, stage: Stage) -> None:
        if not self._local:
            self._sums[stage.index].launch()

    def finish(self, loss: Tensor) -> Tensor:
        """Waits for the sums of a step that has succeeded.

        Args:
            loss: this process's part of it: [].

        Returns:
            The loss of all processes' batches: [].

        Raises:
            PeerError: a peer has failed, is gone, or has not come in time.
        """
        for gradients in self._late:
            gradients.launch()
        total = self._end(loss)
        said = self._exchange(PeerMessage(), _Phase.OVER)
        _refuse_failures(said, "in this step", "its gradients are undefined in all processes")
        for gradients in (*self._sums.values(), *self._late):
            gradients.finish()
        self._summed = not self._local
        return total

    def _end(self, loss: Tensor) -> Tensor:
        """The sum of losses, when everything that was launched is there."""
        total = loss.clone()
        try:
            if self._loss is None:
                group = self._groups[self._lane_of[-1]]
                work = dist.all_reduce(total, group=group, async_op=True)
                self._loss = Pending(work, on_host=total.device.type == "cpu")
            for gradients in (*self._sums.values(), *self._late):
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
                    self._sums[action.stage].complete()
        for gradients in self._late:
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
        rows = [
            [
                self._span(span)
                for span in row
                if span.action.kind is Kind.REDUCE and self._sums[span.action.stage].pending
            ]
            for row in timeline.rows
        ]
        return Timeline(rows if any(rows) else [])

    def _span(self, launch: Span) -> Span:
        pending = self._sums[launch.action.stage].pending
        took = max(one.end_ns for one in pending) - pending[0].start_ns
        return Span(launch.action, launch.start_ns, launch.start_ns + took)

    def close(self) -> None:
        """Gives the groups back."""
        self._lost = self._lost or "it was closed"
        give_back(self._own)


def _refuse_failures(said: Sequence[PeerMessage], when: str, consequence: str) -> None:
    for rank, message in enumerate(said):
        if message.failure:
            raise PeerError(
                f"process {rank} of the group has failed {when}: {message.failure}; {consequence}"
            )
