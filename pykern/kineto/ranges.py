"""Steps, actions and GPU work in the events of a trace."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..recorded.steps import GpuWork, Recorded, RecordedStep, StepsByTime, action_of
from .chrome_trace import TraceEvent

# As the core writes them. A caller that alone is recorded tells the actions of workers at the end
# of a step, with their times from the step's first action on.
_STEP = "pykern step"
_ACTION = re.compile(
    r"pykern (?P<kind>[A-Z_]+) s(?P<stage>\d{1,5}) mb(?P<microbatch>\d{1,10})"
    r" dev(?P<device>\d{1,5})"
    r"(?: at (?P<at>\d{1,18}) for (?P<ns>\d{1,18}) ns)?"
)
_HOST = ("cpu_op", "user_annotation")
_CALLS = ("cuda_runtime", "cuda_driver")
_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def steps_of(events: Sequence[TraceEvent]) -> list[RecordedStep]:
    """All steps of a trace, by their starts. Empty if no pipeline of pykern has run in it.

    Raises:
        ValueError: a range has the form of an action's, and tells none.
    """
    # The processes of a trace as numbers, whatever they are called.
    numbers: dict[str, int] = {}
    ours = [event for event in events if event.category in _HOST]
    found = StepsByTime(
        RecordedStep(_number(numbers, event), event.start_ns, event.end_ns)
        for event in ours
        if event.name == _STEP
    )
    for event in ours:
        told = _ACTION.fullmatch(event.name)
        step = told and found.at(_number(numbers, event), event.start_ns)
        if told and step:
            step.ran.append(_recorded(told, event, step))
    found.add_gpu_work(_issued(events, numbers))
    return found.steps


def _number(numbers: dict[str, int], event: TraceEvent) -> int:
    return numbers.setdefault(str(event.process), len(numbers))


def _recorded(told: re.Match[str], event: TraceEvent, step: RecordedStep) -> Recorded:
    stage, microbatch = int(told["stage"]), int(told["microbatch"])
    action = action_of(event.name, told["kind"], stage, microbatch)
    start, end = event.start_ns, event.end_ns
    if told["at"] is not None:
        start = step.start_ns + int(told["at"])
        end = start + int(told["ns"])
    return Recorded(action, int(told["device"]), start, end, str(event.thread))


def _issued(events: Sequence[TraceEvent], numbers: dict[str, int]) -> Iterator[GpuWork]:
    """The work on GPUs whose calls are in the trace, or the ranges around these.

    torch's profiler writes calls of the driver down only where they launch a kernel, so launches of
    graphs and copies by pykern's core have the range alone.
    """
    calls = {event.correlation: event for event in events if event.category in _CALLS}
    ranges = {event.external: event for event in events if event.category in _HOST}
    for event in events:
        if event.category not in _WORK:
            continue
        call = calls.get(event.correlation) if event.correlation is not None else None
        if call is None and event.external is not None:
            call = ranges.get(event.external)
        if call is not None:
            issuer = _number(numbers, call), str(call.thread)
            yield GpuWork(*issuer, call.start_ns, event.start_ns, event.end_ns)
