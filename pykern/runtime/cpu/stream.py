"""The flow of batches through CPU workers."""

from __future__ import annotations

import os
import sys
import threading
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import torch

from ... import _C
from ...plan import Action, Plan
from ...tensors.trees import Call
from ..batch import Outputs
from ..caller_state import CallerState
from ..stage.stage import Ends
from ..stream import Flow, OpenBatch
from ..timeout import PipelineStalled

# The longest wait before a waiting thread checks the state itself.
_TICK_S = 0.1


class _UnderWay:
    """A batch that has been fed."""

    def __init__(self, number: int, num_parts: int, outputs: Outputs) -> None:
        self.number = number
        self.num_parts = num_parts
        self.outputs = outputs

    @property
    def is_done(self) -> bool:
        return len(self.outputs.parts) == self.num_parts


class _News:
    """A signal between threads.

    An Event would not do, because an interrupt may leave its lock locked.

    Attributes:
        ended: whether the thread has ended and released its objects.
    """

    def __init__(self) -> None:
        self.ended = False
        self._free = threading.Lock()

    def tell(self) -> None:
        """Wakes a waiting thread."""
        with suppress(RuntimeError):
            self._free.release()

    def wait(self) -> None:
        """Waits for `tell`, or for a short time, because an interrupt may lose the signal."""
        self._free.acquire(timeout=_TICK_S)


def _live(flow: list[WorkerFlow], news: _News) -> None:
    """The flow's thread."""
    flow.pop()._live()
    news.ended = True
    news.tell()


class WorkerFlow(Flow):
    """A flow on the workers, which run one endless step.

    A thread of the flow waits for the end of that step, so that batches run while the caller does
    other work. The caller feeds batches and takes finished outputs.

    Args:
        plan, open_batch, first: as for `Flow`.
        core: the executor.
        run: runs `program` for this flow until it is stopped or fails.

    Attributes:
        program: runs slots through the stages.
        takers: of the first stages, by replica; called with a slot and the model's arguments for
            the slot, in the replica that runs the slot.
        keywords: by slot, keyword arguments for all layers whose forward names them.
    """

    def __init__(
        self,
        plan: Plan,
        open_batch: OpenBatch,
        first: int,
        core: _C.WorkerExecutor,
        run: Callable[[WorkerFlow], None],
    ) -> None:
        super().__init__(plan, open_batch, first)
        self.program = _C.WorkerProgram.endless(plan.placement, self.num_slots)
        self.takers: Sequence[Callable[[int, tuple[Any, ...]], None]] = ()
        self.keywords: list[dict[str, Any]] = [{}] * self.num_slots
        self._core = core
        self._run = run
        self._batches: deque[_UnderWay] = deque()
        self._next_slot = 0
        # By slot: the batch, and the index of the microbatch in the batch.
        self._cells: list[tuple[_UnderWay, int] | None] = [None] * self.num_slots
        self._caller = CallerState(plan.num_devices)
        self._caller.grad = False
        # Threads that run user code, which may drop the last reference to this flow.
        self._inside: set[int] = set()
        self._process = os.getpid()
        self._failure: BaseException | None = None
        # Whether the thread runs the program or never will; the first caller of setdefault decides.
        self._fate: dict[str, bool] = {}
        self._begun = False
        self._news = _News()
        self._context = copy_context()

    def _live(self) -> None:
        self._inside.add(threading.get_ident())
        if not self._fate.setdefault("lives", True):
            return
        try:
            # This thread needs its own grad mode, which decides whether random draws are watched.
            with torch.no_grad():
                self._run(self)
        except BaseException as error:
            self._failure = error

    def _open(self) -> None:
        """Starts a thread that runs the program; after an interrupt here, `close` cleans up."""
        try:
            # `threading` would not do: an interrupt may leave its Python code half done.
            start_new_thread(self._context.run, (_live, [self], self._news))
        except RuntimeError as error:
            raise RuntimeError(
                "a stream needs one thread besides those of the devices, and the system refused "
                "that thread. Close other pipelines, or raise the limit of threads (ulimit -u, "
                "pids.max of the container) or of memory (ulimit -v)"
            ) from error
        while not (self._begun or self._news.ended):
            self._news.wait()

    def begun(self) -> None:
        """Marks that the program can be fed."""
        self._begun = True
        self._news.tell()

    def carry(self) -> Callable[[], None]:
        """Applies the caller's state to the calling worker; returns the undoing."""
        self._inside.add(threading.get_ident())
        return self._caller()

    @property
    def is_open(self) -> bool:
        """Whether the flow occupies the stages."""
        return self._fate.get("lives", False) and not self._news.ended

    def feed(self, call: Call) -> None:
        """Cuts a batch into microbatches, which run after the microbatches of earlier batches.

        Raises:
            RuntimeError: the system refuses a thread, or the flow is from before a fork.
        """
        self._refuse_fork()
        if not self._fate:
            self._open()
        with _C.HoldForks(), torch.no_grad():
            opened, outputs = self._open_batch(call)
            parts = [part for part in opened.calls if part is not None]
        batch = _UnderWay(self._num_fed, len(parts), outputs)
        self._batches.append(batch)
        self._num_fed += 1
        self._num_used += len(parts)
        try:
            for index, part in enumerate(parts):
                self._feed(batch, index, part)
        except BaseException:
            # The batch is incomplete, so no caller may wait for the batch.
            self._batches.pop()
            self._num_used -= len(parts)
            raise

    def _feed(self, batch: _UnderWay, index: int, part: Call) -> None:
        """Gives a microbatch the next slot."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % self.num_slots
        self._cells[slot] = batch, index
        arguments, self.keywords[slot] = part
        self.takers[slot % len(self.takers)](slot, arguments)
        self._core.feed(self.program, slot)

    def keep(self, slot: int, output: Any, once: bool) -> Ends:
        """Takes the output of the last stage for a slot."""
        cell = self._cells[slot]
        assert cell is not None
        batch, index = cell
        self._cells[slot] = None
        self.keywords[slot] = {}
        ends = batch.outputs(index, output, once)
        if batch.is_done:
            self._news.tell()
        return ends

    def take(self) -> Any:
        """Waits for the oldest batch of the flow, and returns its output.

        Raises:
            BaseException: the first exception of a stage. No batch runs any more.
        """
        self._refuse_fork()
        batch = self._batches[0]
        self._wait_for(batch)
        if not batch.is_done:
            self._raise_failure()
        self._batches.popleft()
        self._num_used -= batch.num_parts
        with torch.no_grad():
            return batch.outputs.merged()

    def settle(self) -> None:
        """Waits until no batch of the flow runs."""
        for batch in self._batches:
            self._wait_for(batch)

    def _wait_for(self, batch: _UnderWay) -> None:
        """Waits until the batch is done, or the thread has ended."""
        while not (batch.is_done or self._news.ended):
            self._news.wait()

    def located(self, action: Action) -> tuple[Action, str]:
        """The action numbered within its batch, and the batch."""
        cell = self._cells[action.microbatch]
        if cell is None:
            return action, ""
        batch, index = cell
        return Action(action.kind, action.stage, index), f"batch {batch.number} of the stream"

    def close(self, error: BaseException | None) -> None:
        """Stops the actions in flight, and ends the thread. After an interrupt, call `close` again.

        A stage that drops the last reference to the flow closes it without waiting for the end.

        Args:
            error: the exception that ends the stream; None if the stream has come to its end.

        Raises:
            KeyboardInterrupt: an interrupt came during this call, whatever `error` is.
            PipelineStalled: an action did not end, whatever `error` is.
            BaseException: a stage raised it, and `error` is None.
        """
        interrupt = error if isinstance(error, KeyboardInterrupt) else None
        again: KeyboardInterrupt | None = None
        lives = self._fate.setdefault("lives", False)
        while lives and not (self._news.ended or self._is_alone()):
            try:
                if self._begun:
                    self._core.stop(self.program, interrupt)
                    interrupt = None
                if threading.get_ident() in self._inside:
                    return
                self._news.wait()
            except KeyboardInterrupt as another:
                interrupt = again = another
        self._batches.clear()
        self._caller.restore_threads()
        failure, self._failure = self._failure, None
        if isinstance(failure, PipelineStalled):
            raise failure
        if again is not None:
            raise again
        if failure is not None and error is None:
            raise failure

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        try:
            raise failure or RuntimeError("the stream has ended")
        finally:
            # Its traceback holds this frame.
            del failure

    def _is_alone(self) -> bool:
        """Whether the thread vanished: in a forked child, or while Python shuts down."""
        return os.getpid() != self._process or sys.is_finalizing()

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "this stream was begun in another process and does not survive a fork. Make a new "
                "pipeline in the child"
            )
