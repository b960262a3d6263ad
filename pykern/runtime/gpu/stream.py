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
    """A flow whose batches are issued one after another, ahead of when they are taken out.

    The streams of the lanes do one batch behind the other. Where each is done is marked on streams
    of the flow's own, so that the caller's streams wait for the batch that is taken out and for
    none of those behind it.

    Args:
        plan, open_batch, first: as for `Flow`.
        gpus: those of the plan.
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
        # Each with its output, and with its inputs, whose memory the caller's streams may use again
        # when it is done.
        self._batches: deque[tuple[int, Any, list[Event], Any]] = deque()
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether the stages are its own."""
        return not self._closed

    def feed(self, call: Call) -> None:
        """Issues a batch behind those before."""
        batch: Batch | None = None
        number = self._num_fed
        self._num_fed += 1
        with torch.no_grad(), self._gpus.aside():
            try:
                batch, outputs = self._open_batch(call)
                self._issue(batch, number)
                output = outputs.merged()
            except BaseException:
                # Left to `close`: what was issued may still read the inputs.
                self._batches.append((0, None, self._gpus.mark(), (call, batch)))
                raise
            done = self._gpus.mark()
        num_parts = len(outputs.parts)
        self._batches.append((num_parts, output, done, (call, batch)))
        self._num_used += num_parts

    def take(self) -> Any:
        """The output of the batch that was issued first among those here."""
        num_parts, output, done, _ = self._batches.popleft()
        self._num_used -= num_parts
        self._gpus.follow(done, output)
        return output

    def settle(self) -> None:
        """Issued is all that has been fed, and what the caller issues aside comes after it."""

    def close(self, _: BaseException | None) -> None:
        """Lets go of what is under way: what the caller issues from now on comes after it."""
        self._closed = True
        while self._batches:
            self.take()
