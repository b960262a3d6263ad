"""A flow of batches: a batch enters the stages before earlier batches have ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..plan import Plan
from ..tensors.trees import Call
from .batch import Batch, Outputs

# Makes a Batch from the arguments of the model. Its `finish` is the returned Outputs.
OpenBatch = Callable[[Call], tuple[Batch, Outputs]]


class Flow(ABC):
    """Batches in flight, limited by the number of slots.

    Each microbatch with rows has a slot until its batch is taken out. There are slots for two full
    batches, one of which the caller may be working on, and for one more microbatch per stage. So
    batches with fewer microbatches than stages keep all stages busy, too.

    Args:
        plan: of the pipeline.
        open_batch: makes a batch from the arguments of the model.
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
        """Whether the flow occupies the stages."""

    @abstractmethod
    def feed(self, call: Call) -> None:
        """Takes in a batch."""

    @abstractmethod
    def take(self) -> Any:
        """Waits for the oldest batch of the flow, and returns its output."""

    @abstractmethod
    def settle(self) -> None:
        """Waits until no batch of the flow runs on the host."""

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """Ends the flow and its batches. A KeyboardInterrupt as `error` also interrupts stages."""
