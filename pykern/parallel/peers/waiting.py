"""Waiting for collectives without blocking signals."""

from __future__ import annotations

import threading
import time
from typing import Any

# The interval at which a waiting thread lets Python handle signals.
_TICK_S = 0.05


class Pending:
    """A collective under way.

    Args:
        work: the Work object of torch.distributed.
        on_host: whether the tensors are on the CPU, so that the host waits for the collective.

    Attributes:
        start_ns, end_ns: times of `time.perf_counter_ns`; the end is 0 before it is known.
    """

    def __init__(self, work: Any, *, on_host: bool) -> None:
        self._work = work
        self._on_host = on_host
        self._done = threading.Event()
        self.start_ns = time.perf_counter_ns()
        self.end_ns = 0
        if on_host:
            work.get_future().add_done_callback(self._note)

    def _note(self, _: Any) -> None:
        self.end_ns = time.perf_counter_ns()
        self._done.set()

    def wait(self) -> None:
        """Waits for the collective's end; on a GPU torch's current stream waits, not the host.

        Raises:
            RuntimeError: a peer is gone, or has not come in time.
        """
        if self._work is None:
            return
        while self._on_host and not self._done.wait(_TICK_S):
            pass
        self._work.wait()
        # The work holds its tensors, so it is dropped; this object is kept for its times.
        self._work = None
