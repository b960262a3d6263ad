"""Batches that go through the stages one behind the other: none waits for the end of another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from typing import Any

from ..plan import Plan
from .batch import Batch, Call, Outputs

# Makes a batch of the arguments of the model; the outputs are its `finish`.
OpenBatch = Callable[[Call], tuple[Batch, Outputs]]


class Flow(ABC):
    """What is under way, of which no more is taken in than there are slots.

    Each microbatch with rows has a slot until its batch is taken out. There are slots for two full
    batches, one of which the caller may be busy with, and for one more microbatch in each stage:
    batches of less than a microbatch in each keep all stages busy as well.

    Args:
        plan: of the pipeline.
        open_batch: makes a batch of what is fed.
    """

    def __init__(self, plan: Plan, open_batch: OpenBatch) -> None:
        self._open_batch = open_batch
        self._num_microbatches = plan.num_microbatches
        self.num_slots = 2 * plan.num_microbatches + plan.num_stages
        self._num_used = 0

    @property
    def has_room(self) -> bool:
        """Whether any batch can be fed."""
        return self._num_used + self._num_microbatches <= self.num_slots

    @property
    def is_empty(self) -> bool:
        """Whether all batches have been taken out."""
        return self._num_used == 0

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether the stages are its own."""

    @abstractmethod
    def feed(self, call: Call) -> None:
        """Takes in a batch."""

    @abstractmethod
    def take(self) -> Any:
        """The output of the batch that was fed first among those here, once it is done."""

    @abstractmethod
    def settle(self) -> None:
        """Waits until nothing of what has been fed is under way on the host."""

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """Ends it, and what is under way. A KeyboardInterrupt also interrupts that."""

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self.close(error)


def in_order(batches: Iterator[Call], flow: Flow) -> Generator[Any, None, None]:
    """The output of each batch, as the flow gives it, which is closed in the end."""
    failure: Exception | None = None
    with flow:
        more = True
        while more or not flow.is_empty:
            try:
                more = more and _fill(flow, batches)
            except Exception as error:
                # Its turn comes after the outputs of the batches before.
                failure, more = error, False
            if not flow.is_empty:
                yield flow.take()
    if failure is not None:
        try:
            raise failure
        finally:
            # Its traceback holds this frame.
            failure = None


def _fill(flow: Flow, batches: Iterator[Call]) -> bool:
    """Takes as many batches as there is room for; returns whether there may be more."""
    if flow.has_room:
        for batch in batches:
            flow.feed(batch)
            if not flow.has_room:
                return True
        return False
    return True
