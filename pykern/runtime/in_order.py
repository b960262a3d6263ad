"""The outputs of batches, in the order of the batches."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from .. import _C
from ..modes import as_before
from ..tensors.trees import Call
from .stream import Flow


class InOrder(Iterator[Any]):
    """Yields the output of each batch, from a flow as soon as batches may overlap.

    An exception of `batches` is raised after the outputs of earlier batches; a KeyboardInterrupt is
    raised at once. After any exception, the stream has ended and no batch is running.

    Args:
        batches: the arguments of each batch.
        begin: called before the first batch.
        alone: runs one batch, given with its number, and returns the output.
        flow_from: opens a flow whose first batch has this number; returns None while batches have
            to run one by one.
        is_alike: whether a batch has the same values beside tensors as the one that ran last alone.
            Such values may steer layers, so others end the flow, and run alone.
    """

    def __init__(
        self,
        batches: Iterator[Call],
        begin: Callable[[], None],
        alone: Callable[[Call, int], Any],
        flow_from: Callable[[int], Flow | None],
        is_alike: Callable[[Call], bool],
    ) -> None:
        # The call that takes an output, if any.
        self._turn: dict[str, object] = {}
        self._batches = batches
        # The batch, if any, that was fetched but neither fed nor run yet.
        self._fetched: list[Call] = []
        self._begin: Callable[[], None] | None = begin
        self._alone = alone
        self._flow_from = flow_from
        self._is_alike = is_alike
        # Whether the next batch has other values than those of the flow.
        self._is_other = False
        self._flow: Flow | None = None
        self._num_begun = 0
        # The exception that `batches` raised.
        self._failure: BaseException | None = None
        self._ended = False
        # Closes the flow when the iterator is dropped. `__del__` would run at the end of every
        # iterator, and would lose an interrupt.
        self._let_go: weakref.finalize[[BaseException], InOrder] | None = None

    def __next__(self) -> Any:
        """The next output.

        Raises:
            ValueError: an output is being taken already.
            BaseException: a stage or `batches` raised it. A StopIteration, which would end a loop
                silently, becomes the cause of a RuntimeError.
        """
        turn = object()
        with _C.Undo(self._give_back, turn), as_before():
            self._take_turn(turn)
            with _C.Within(_nothing, self._after):
                return self._step()

    def close(self) -> None:
        """Ends the stream and the batches in flight."""
        turn = object()
        with _C.Undo(self._give_back, turn), as_before():
            self._take_turn(turn)
            # Later failures are not reported, as when a generator is closed.
            with _C.Undo(self._end, GeneratorExit()):
                return

    def _take_turn(self, turn: object) -> None:
        # `setdefault` is one call in C, so no interrupt comes between the check and the entry.
        if self._turn.setdefault("turn", turn) is not turn:
            raise ValueError(
                "outputs of a stream must be taken by one thread at a time, got a call while "
                "another takes one"
            )

    def _give_back(self, turn: object) -> None:
        if self._turn.get("turn") is turn:
            self._turn.clear()

    def _after(self, error: BaseException | None) -> None:
        if error is not None:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Ends the flow and its batches. May be called twice."""
        self._ended = True
        self._batches = iter(())
        self._fetched.clear()
        if self._flow is not None:
            self._flow.close(error)
        if self._let_go is not None:
            self._let_go.detach()
        self._flow = None

    def _step(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._begin is not None:
            self._begin()
            self._begin = None
        flow = self._flow
        if flow is None:
            call = self._fetched.pop() if self._fetched else next(self._batches)
            flow = self._flow_from(self._num_begun) if self._is_alike(call) else None
            self._flow = flow
            if flow is None:
                return _not_the_end(partial(self._by_itself, call))
            self._let_go = weakref.finalize(self, flow.close, GeneratorExit())
            self._let_go.atexit = False
            self._fetched.append(call)
            del call
        self._fill(flow)
        if not flow.is_empty:
            return _not_the_end(flow.take)
        if self._is_other:
            self._leave(flow)
            return self._step()
        self._end(None)
        failure, self._failure = self._failure, None
        try:
            raise StopIteration if failure is None else failure
        finally:
            # Its traceback holds this frame.
            del failure

    def _leave(self, flow: Flow) -> None:
        """Ends the flow, but not the stream."""
        flow.close(None)
        if self._let_go is not None:
            self._let_go.detach()
        self._flow, self._is_other = None, False

    def _by_itself(self, call: Call) -> Any:
        number = self._num_begun
        self._num_begun += 1
        return self._alone(call, number)

    def _fill(self, flow: Flow) -> None:
        """Feeds batches until the flow is full."""
        while flow.has_room and self._failure is None and not self._is_other:
            try:
                call = self._fetched.pop() if self._fetched else next(self._batches, None)
                if call is None:
                    return
                if self._is_alike(call):
                    _not_the_end(partial(flow.feed, call))
                    self._num_begun += 1
                else:
                    self._fetched.append(call)
                    self._is_other = True
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                # The error is raised after the outputs of earlier batches.
                self._failure = error


def _nothing() -> None:
    """The begin of a context that acts only at its end."""


def _not_the_end(call: Callable[[], Any]) -> Any:
    """The result of the call; StopIteration, which would end the stream, becomes RuntimeError."""
    try:
        return call()
    except StopIteration as error:
        stopped = RuntimeError(f"a stage, or what a batch is made of, raised {error!r}")
        for note in getattr(error, "__notes__", ()):
            stopped.add_note(note)
        raise stopped from error
