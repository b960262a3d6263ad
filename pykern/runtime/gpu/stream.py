"""The flow of batches through GPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ...plan import Plan
from ...tensors.trees import Call
from ..batch import Batch
from ..stream import Flow, OpenBatch
from .cuda import Event, Gpus


class GpuFlow(Flow):
    """A flow whose batches are issued ahead, before the caller takes earlier outputs.

    The streams of the lanes run one batch after another. Events on the flow's own streams mark the
    end of each batch, so that the caller's streams wait for the batch that is taken out and not for
    later batches.

    Args:
        plan, open_batch, first: as for `Flow`.
        gpus: of the plan.
        issue: issues a step for a batch with its number.
    """

    def __init__(
        self,
        plan: Plan,
        open_batch: OpenBatch,
        first: int,
        gpus: Gpus,
        issue: Callable[[Batch, int], None],
    ) -> None:
        super().__init__(plan, open_batch, first)
        self._gpus = gpus
        self._issue = issue
        # By batch: number of microbatches, output, events at its end, and inputs, whose memory the
        # caller's streams may reuse when the batch is done.
        self._batches: deque[tuple[int, Any, list[Event], Any]] = deque()
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether the flow occupies the stages."""
        return not self._closed

    def feed(self, call: Call) -> None:
        """Issues a batch after earlier batches."""
        batch: Batch | None = None
        number = self._num_fed
        self._num_fed += 1
        with torch.no_grad(), self._gpus.aside():
            try:
                batch, outputs = self._open_batch(call)
                self._issue(batch, number)
                output = outputs.merged()
            except BaseException:
                # `close` frees the inputs, because issued kernels may still read them.
                self._batches.append((0, None, self._gpus.mark(), (call, batch)))
                raise
            done = self._gpus.mark()
        num_parts = len(outputs.parts)
        self._batches.append((num_parts, output, done, (call, batch)))
        self._num_used += num_parts

    def take(self) -> Any:
        """The output of the oldest batch of the flow."""
        num_parts, output, done, _ = self._batches.popleft()
        self._num_used -= num_parts
        self._gpus.follow(done, output)
        return output

    def settle(self) -> None:
        """Does nothing: all batches are issued, and later work of the caller comes after them."""

    def close(self, _: BaseException | None) -> None:
        """Drops all batches; later work of the caller is ordered after them."""
        self._closed = True
        while self._batches:
            self.take()
