"""Timelines as a Chrome trace, for Perfetto (ui.perfetto.dev) or chrome://tracing."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from pykern._C import Action, Kind, Timeline
from pykern.plan.drawing.words import require_timelines, row_names
from pykern.plan.inputs import inputs
from pykern.replacing import replacing

_COMPUTED = (Kind.F, Kind.B, Kind.I, Kind.W)


def save_chrome_trace(
    timelines: Mapping[str, Timeline],
    path: str | os.PathLike[str],
    held_bytes: Mapping[Action, float] | None = None,
) -> None:
    """Writes timelines as one process each, with a thread for each device or copy stream.

    Arrows lead from each forward and backward to that of the next stage on another device. A
    counter of each device has its microbatches in flight, from the start of F to the end of the
    last of F, B, I and W: of F, where a stage has forwards alone.

    Args:
        timelines: By label. A label may hold anything.
        path: File to write; an existing one is replaced at once or not at all.
        held_bytes: By action, how many bytes more its device holds behind it, for a counter of the
            activations of each device; None for no such counter.

    Raises:
        ValueError: There is nothing to draw.
        OSError: The file cannot be written.
    """
    require_timelines(timelines)
    events = [
        event
        for process, (label, timeline) in enumerate(timelines.items())
        for event in (
            *events_of(process, label, timeline),
            *arrows_of(process, timeline),
            *counters_of(process, timeline, held_bytes or {}),
        )
    ]
    with replacing(Path(path)) as partial, partial.open("w", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, file)


def events_of(process: int, label: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The names of one timeline's process and threads, then its spans in microseconds."""
    yield named("process_name", label, pid=process)
    for number, (name, row) in enumerate(zip(row_names(timeline), timeline.rows, strict=True)):
        yield named("thread_name", name, pid=process, tid=number)
        for span in row:
            yield {
                "name": str(span.action),
                "cat": span.action.kind.name,
                "ph": "X",
                "pid": process,
                "tid": number,
                "ts": span.start_ns / 1e3,
                "dur": (span.end_ns - span.start_ns) / 1e3,
                "args": {
                    "stage": span.action.stage,
                    "microbatch": span.action.microbatch,
                    "slice": span.action.slice,
                },
            }


def arrows_of(process: int, timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Two events for each action whose result an action of another device takes."""
    places = {span.action: (row, span) for row, spans in enumerate(timeline.rows) for span in spans}
    for number, (action, (row, span)) in enumerate(places.items()):
        for maker, made in (places[each] for each in inputs(action) if each in places):
            if maker != row:
                arrow = {"name": "hand-over", "cat": "hand-over", "pid": process}
                arrow["id"] = f"{process}.{number}"
                yield {**arrow, "ph": "s", "tid": maker, "ts": made.end_ns / 1e3}
                yield {**arrow, "ph": "f", "bp": "e", "tid": row, "ts": span.start_ns / 1e3}


def counters_of(
    process: int, timeline: Timeline, held_bytes: Mapping[Action, float]
) -> Iterator[dict[str, Any]]:
    """By device, an event for each change of the microbatches in flight and of the bytes held."""
    for name, row in zip(row_names(timeline), timeline.rows, strict=True):
        # An action has several spans where they are its kernels.
        starts: dict[Action, float] = {}
        ends: dict[Action, float] = {}
        for span in row:
            starts.setdefault(span.action, span.start_ns)
            ends[span.action] = max(span.end_ns, ends.get(span.action, span.end_ns))
        flights = [(ns, 1.0) for action, ns in starts.items() if action.kind is Kind.F]
        # An action of each cell that is computed, as its ends ascend: the last one stays.
        landings = {
            (action.stage, action.microbatch, action.slice): ns
            for action, ns in sorted(ends.items(), key=itemgetter(1))
            if action.kind in _COMPUTED
        }
        flights += [(ns, -1.0) for ns in landings.values()]
        bytes_ = [(ns, held_bytes[action]) for action, ns in ends.items() if held_bytes.get(action)]
        yield from _counter(process, f"in flight, {name}", "microbatches", flights)
        yield from _counter(process, f"activations as predicted, {name}", "bytes", bytes_)


def _counter(
    process: int, name: str, unit: str, changes: Iterable[tuple[float, float]]
) -> Iterator[dict[str, Any]]:
    now = 0.0
    for ns, change in sorted(changes):
        now += change
        yield {"name": name, "ph": "C", "pid": process, "ts": ns / 1e3, "args": {unit: now}}


def named(what: str, name: str, **ids: int) -> dict[str, Any]:
    """The metadata event that gives a process or a thread its name."""
    return {"name": what, "ph": "M", **ids, "args": {"name": name}}
