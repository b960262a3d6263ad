"""The report of a step whose actions do not end on CPU workers."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence

from ...plan import Action
from ..timeout import PipelineStalled

# An action and its device.
DeviceAction = tuple[Action, int]
# Names an action and its device, for a message.
Where = Callable[[Action, int], str]


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
