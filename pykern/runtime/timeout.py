"""The limit of an action's time, and the error for a step whose actions do not end."""

from __future__ import annotations

import math


class PipelineStalled(RuntimeError):
    """An action did not end within `timeout`, or, on a CPU worker, soon after a second Ctrl-C.

    CPU workers: the message names the stage, the duration, the Python line of its worker, and the
    action that every other device waits for. The worker thread ends when the stage returns, or with
    the process; the process does not wait for the thread.

    GPUs: the message names the stream, the action, the microbatch and the event that has not come,
    what was issued last, and the event that every other stream waits for.

    The pipeline is closed.
    """


def refuse_timeout(timeout: object) -> None:
    """Raises TypeError or ValueError if `timeout` is invalid."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    if not 0 < timeout < math.inf:
        raise ValueError(
            f"timeout must be a number of seconds above 0, got {timeout}. Omit timeout for no limit"
        )
