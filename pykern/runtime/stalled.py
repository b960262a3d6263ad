"""A step whose actions do not end, and what can be told of it."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable, Sequence

from ..plan import Action

# An action and its device.
Place = tuple[Action, int]
# Says where an action is, for a message.
Where = Callable[[Action, int], str]


class PipelineStalled(RuntimeError):
    """A stage has not come back from an action in time, or goes on behind a second Ctrl-C.

    The message says which, for how long, where in Python its worker is, and what every other device
    waits for. The pipeline is closed. The worker is left to itself: it ends when the stage comes
    back, or with the process, which does not wait for it.
    """


def stalled(
    where: Where,
    acting: Sequence[tuple[Place, float, int]],
    rows: Sequence[tuple[Place, Sequence[Place]]],
) -> PipelineStalled:
    """The exception for a step.

    Args:
        where: names an action.
        acting: what has not ended, for how many seconds, and the worker's thread.
        rows: the next action of each device that waits for another, and what that has not run.
    """
    if not acting:
        return PipelineStalled("the step was given up; the pipeline is closed")
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


def refuse_timeout(timeout: object, device_type: str) -> None:
    """Raises TypeError or ValueError for what is not a timeout, or not on such devices."""
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout must be a number of seconds or None, got {timeout!r}")
    if not 0 < timeout < math.inf:
        raise ValueError(
            f"timeout must be a number of seconds above 0, got {timeout}. Leave it out for none"
        )
    if device_type != "cpu":
        raise ValueError(
            f"timeout must be None on GPUs, got {timeout}: stages run on the calling thread there. "
            "Use Ctrl-C, which reaches them"
        )
