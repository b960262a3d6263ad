"""Batches that go through the stages one behind the other: none waits for the end of another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..plan import Plan
from ..tensors.trees import Call
from .batch import Batch, Outputs

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
        first: the number of the first batch, for notes.
    """

    def __init__(self, plan: Plan, open_batch: OpenBatch, first: int) -> None:
        self._open_batch = open_batch
        self._num_fed = first
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
