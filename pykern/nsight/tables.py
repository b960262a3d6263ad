"""Steps, actions and GPU work in the tables of a report."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from ..plan import Action
from ..recorded.steps import GpuWork, Recorded, RecordedStep, StepsByTime, action_of

# Types of NVTX events: ranges that are pushed and popped, and new domains. A thread's global number
# has its process in the bits above the lowest 24.
_PUSHED, _DOMAIN = 59, 75
_BITS_OF_THREAD = 24
_DOMAINS = (
    "SELECT globalTid >> 24, domainId FROM NVTX_EVENTS WHERE eventType = ? AND text = 'pykern'"
)
_RANGES = """
SELECT range.start, range.end, range.globalTid, range.domainId,
       COALESCE(range.uint64Value, 0), COALESCE(range.text, string.value, '')
FROM NVTX_EVENTS AS range
LEFT JOIN StringIds AS string ON string.id = range.textId
WHERE range.eventType = ? AND range.end IS NOT NULL
ORDER BY range.start
"""
# Kernels, copies, fills, and graphs that are launched as a whole.
_WORK = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
_ISSUED = """
SELECT call.globalTid >> 24, call.globalTid, call.start, work.start, work.end
FROM CUPTI_ACTIVITY_KIND_{work} AS work
JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS call
  ON call.correlationId = work.correlationId AND call.globalTid >> 24 = work.globalPid >> 24
"""


def steps_of(tables: sqlite3.Connection) -> list[RecordedStep]:
    """All steps of a report, by their starts. Empty if no pipeline of pykern has run in it."""
    steps: list[RecordedStep] = []
    actions: list[tuple[int, Recorded]] = []
    for start, end, thread, payload, text in _rows(tables):
        process = thread >> _BITS_OF_THREAD
        if text == "step":
            steps.append(RecordedStep(process, start, end))
        else:
            actions.append((process, Recorded(*_of(text, payload), start, end, thread)))
    found = StepsByTime(steps)
    for process, ran in actions:
        step = found.at(process, ran.start_ns)
        if step is not None:
            step.ran.append(ran)
    found.add_gpu_work(_issued(tables))
    return found.steps


def num_cores(tables: sqlite3.Connection) -> int | None:
    """The number of cores of the machine that was recorded; None if the report does not tell."""
    if not _has_table(tables, "TARGET_INFO_SYSTEM_ENV"):
        return None
    query = "SELECT value FROM TARGET_INFO_SYSTEM_ENV WHERE name = 'CpuCores'"
    found = tables.execute(query).fetchone()
    return None if found is None else int(found[0])


def _rows(tables: sqlite3.Connection) -> Iterator[tuple[int, int, int, int, str]]:
    if not _has_table(tables, "NVTX_EVENTS"):
        return
    ours = set(tables.execute(_DOMAINS, (_DOMAIN,)))
    for start, end, thread, domain, payload, text in tables.execute(_RANGES, (_PUSHED,)):
        if (thread >> _BITS_OF_THREAD, domain) in ours:
            yield start, end, thread, payload, text


def _issued(tables: sqlite3.Connection) -> Iterator[GpuWork]:
    for work in _WORK:
        if _has_table(tables, f"CUPTI_ACTIVITY_KIND_{work}"):
            for row in tables.execute(_ISSUED.format(work=work)):
                yield GpuWork(*row)


def _has_table(tables: sqlite3.Connection, name: str) -> bool:
    """Whether there is such a table: an export leaves out those without rows."""
    query = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
    return tables.execute(query, (name,)).fetchone() is not None


def _of(text: str, payload: int) -> tuple[Action, int]:
    """The action of a range, and its device."""
    stage, microbatch = payload >> 32 & 0xFFFF, payload & 0xFFFFFFFF
    return action_of(text, text.partition(" ")[0], stage, microbatch), payload >> 48 & 0xFFFF
