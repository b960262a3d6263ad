"""The ranges that pykern's core has written into a report, by step."""

from __future__ import annotations

import sqlite3
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..plan import Action, Kind

# Types of NVTX events: ranges that are pushed and popped, and new domains. A thread's global number
# has its process in the bits above the lowest 24.
_PUSHED, _DOMAIN = 59, 75
_DOMAINS = (
    "SELECT globalTid >> 24, domainId FROM NVTX_EVENTS WHERE eventType = ? AND text = 'pykern'"
)
_RANGES = """
SELECT range.start, range.end, range.globalTid >> 24, range.domainId, range.uint64Value,
       COALESCE(range.text, string.value)
FROM NVTX_EVENTS AS range
LEFT JOIN StringIds AS string ON string.id = range.textId
WHERE range.eventType = ? AND range.end IS NOT NULL
ORDER BY range.start
"""


@dataclass(slots=True)
class Recorded:
    """An action or a copy of a step, as the thread saw it that ran or issued it.

    Attributes:
        action: the action, or the copy.
        device: its device; the sender of a copy.
        start_ns: when the thread began.
        end_ns: when the thread was through.
        gpu_ns: start and end of all work that it issued to GPUs; None if it issued nothing.
    """

    action: Action
    device: int
    start_ns: int
    end_ns: int
    gpu_ns: tuple[int, int] | None = None


@dataclass(slots=True)
class RecordedStep:
    """A step of a report.

    Attributes:
        process: the number of its process.
        start_ns: when its caller began.
        end_ns: when its caller went on.
        ran: its actions and copies, by their starts.
    """

    process: int
    start_ns: int
    end_ns: int
    ran: list[Recorded] = field(default_factory=list)


_Spanned = TypeVar("_Spanned", Recorded, RecordedStep)


def steps_of(tables: sqlite3.Connection) -> list[RecordedStep]:
    """All steps of a report, by their starts. Empty if no pipeline of pykern has run in it."""
    steps: dict[int, list[RecordedStep]] = {}
    actions: list[tuple[int, Recorded]] = []
    for start, end, process, payload, text in _rows(tables):
        if text == "step":
            steps.setdefault(process, []).append(RecordedStep(process, start, end))
        else:
            actions.append((process, Recorded(*_of(text, payload), start, end)))
    for process, ran in actions:
        step = at(steps.get(process, ()), ran.start_ns)
        if step is not None:
            step.ran.append(ran)
    return sorted((step for of in steps.values() for step in of), key=lambda one: one.start_ns)


def at(spans: Sequence[_Spanned], ns: int) -> _Spanned | None:
    """Among spans by their starts, which do not overlap, the one of a time; None for a gap."""
    number = bisect_right(spans, ns, key=lambda one: one.start_ns) - 1
    return spans[number] if number >= 0 and ns <= spans[number].end_ns else None


def _rows(tables: sqlite3.Connection) -> Iterator[tuple[int, int, int, int, str]]:
    if not has_table(tables, "NVTX_EVENTS"):
        return
    ours = set(tables.execute(_DOMAINS, (_DOMAIN,)))
    for start, end, process, domain, payload, text in tables.execute(_RANGES, (_PUSHED,)):
        if (process, domain) in ours:
            yield start, end, process, payload, text


def has_table(tables: sqlite3.Connection, name: str) -> bool:
    """Whether there is such a table: an export leaves out those without rows."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return tables.execute(query, (name,)).fetchone() is not None


def _of(text: str, payload: int) -> tuple[Action, int]:
    """The action of a range, and its device."""
    stage, microbatch = payload >> 32 & 0xFFFF, payload & 0xFFFFFFFF
    return Action(Kind[text.partition(" ")[0]], stage, microbatch), payload >> 48 & 0xFFFF
