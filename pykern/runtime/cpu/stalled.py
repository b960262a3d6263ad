"""The error for a step whose actions do not end."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Sequence

from ...plan import Action

# An action and its device.
DeviceAction = tuple[Action, int]
# Names an action and its device, for a message.
Where = Callable[[Action, int], str]


class PipelineStalled(RuntimeError):
    """A stage did not return from an action within `timeout`, or soon after a second Ctrl-C.

    The message names the stage, the duration, the Python line of its worker, and the action that
    every other device waits for. The pipeline is closed. The worker thread ends when the stage
    returns, or with the process; the process does not wait for the thread.
    """


def stalled(
    where: Where,
    acting: Sequence[tuple[DeviceAction, float, int]],
    rows: Sequence[tuple[DeviceAction, Sequence[DeviceAction]]],
) -> PipelineStalled:
    """The exception for a step.

    Args:
        where: names an action.
        acting: actions that have not ended, each with its seconds and its worker's thread.
        rows: the next action of each device that waits, and the inputs that have not run.
    """
    if not acting:
        return PipelineStalled("the step was abandoned; the pipeline is closed")
    (place, seconds, _), *_ = acting
    lines = [f"{where(*place)} has not ended for {seconds:.1f} s; the pipeline is closed"]
    frames = sys._current_frames()
    for place, seconds, thread in acting:
        lines.append(f"device {place[1]} is in {where(*place)} for {seconds:.1f} s:")
        frame = frames.get(thread)
        lines += [] if frame is None else "".join(traceback.format_stack(frame)).splitlines()
    for (action, device), inputs in rows:
        missing = ", ".join(f"{one} of device {of}" for one, of in inputs)
        lines.append(f"device {device} waits for {missing or 'a worker'}, to go on with {action}")
    return PipelineStalled("\n".join(lines))


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
