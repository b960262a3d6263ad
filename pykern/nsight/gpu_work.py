"""The work that actions have issued to GPUs, found by the calls that issued it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from .ranges import Recorded, RecordedStep, at, has_table

# Kernels, copies, fills, and graphs that are launched as a whole.
_WORK = ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
_ISSUED = """
SELECT call.start, call.globalTid >> 24, work.start, work.end
FROM CUPTI_ACTIVITY_KIND_{work} AS work
JOIN CUPTI_ACTIVITY_KIND_RUNTIME AS call
  ON call.correlationId = work.correlationId AND call.globalTid >> 24 = work.globalPid >> 24
"""


def add_gpu_work(tables: sqlite3.Connection, steps: Sequence[RecordedStep]) -> None:
    """Notes the span on GPUs of each action and copy that issued any work.

    One thread issues all actions of a step, and autograd's threads issue for it while it waits, so
    the time of a call tells its action, whichever thread made the call.
    """
    by_process: dict[int, list[Recorded]] = {}
    for step in steps:
        by_process.setdefault(step.process, []).extend(step.ran)
    for ran in by_process.values():
        ran.sort(key=lambda one: one.start_ns)
    for work in _WORK:
        if not has_table(tables, f"CUPTI_ACTIVITY_KIND_{work}"):
            continue
        for called, process, start, end in tables.execute(_ISSUED.format(work=work)):
            owner = at(by_process.get(process, ()), called)
            if owner is not None:
                first, last = owner.gpu_ns or (start, end)
                owner.gpu_ns = min(first, start), max(last, end)
