"""Exports made by hand, from the schema that NVIDIA documents for `nsys export --type sqlite`."""

import sqlite3
from collections.abc import Iterable
from pathlib import Path

from pykern.plan import Timeline

CALLER = 0x12345 << 24 | 0x12345
AUTOGRAD = CALLER + 1
# Milliseconds as nanoseconds.
MS = 1_000_000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS StringIds (id INTEGER, value TEXT);
CREATE TABLE IF NOT EXISTS NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT,
    globalTid INTEGER, textId INTEGER, domainId INTEGER, uint64Value INTEGER);
CREATE TABLE IF NOT EXISTS CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER,
    globalTid INTEGER, correlationId INTEGER);
CREATE TABLE IF NOT EXISTS CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
    streamId INTEGER, correlationId INTEGER, globalPid INTEGER);
CREATE TABLE IF NOT EXISTS CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER,
    correlationId INTEGER, globalPid INTEGER, bytes INTEGER);
"""
_DOMAIN, _PUSHED = 75, 59


class Export:
    """An export with pykern's domain, which is told twice, and another one.

    Args:
        path: the file.
        rank: of the process, whose numbers differ.
    """

    def __init__(self, path: Path, rank: int = 0) -> None:
        self._caller = CALLER + (rank << 24)
        self._tables = sqlite3.connect(path, isolation_level=None)
        self._tables.executescript(_SCHEMA)
        self._num_calls = 0
        self._now = 10.0
        for number, name in ((1, "other"), (2, "pykern"), (2, "pykern")):
            self._insert("NVTX_EVENTS", 0, None, _DOMAIN, name, self._caller, None, number, None)

    def _insert(self, table: str, *values: object) -> None:
        marks = ", ".join("?" * len(values))
        self._tables.execute(f"INSERT INTO {table} VALUES ({marks})", values)

    def range(self, text: str, start: float, end: float, payload: int = 0, domain: int = 2) -> None:
        """A range on the caller's thread, in nanoseconds."""
        self._insert(
            "NVTX_EVENTS", int(start), int(end), _PUSHED, text, self._caller, None, domain, payload
        )

    def registered(self, text: str, start: float, end: float, payload: int) -> None:
        """The same, with a registered string as its text."""
        self._insert("StringIds", 7, text)
        self._insert("NVTX_EVENTS", int(start), int(end), _PUSHED, None, CALLER, 7, 2, payload)

    def work(
        self, table: str, called: float, start: float, end: float, thread: int = CALLER
    ) -> None:
        """A kernel or a copy, and the call that issued it."""
        self._num_calls += 1
        call, process = self._num_calls, CALLER >> 24 << 24
        self._insert("CUPTI_ACTIVITY_KIND_RUNTIME", int(called), int(called) + 5, thread, call)
        if table == "KERNEL":
            values: tuple[int, ...] = (0, 7, call, process)
        else:
            values = (0, call, process, 4096)
        self._insert(f"CUPTI_ACTIVITY_KIND_{table}", int(start), int(end), *values)

    def steps(self, timelines: Iterable[Timeline]) -> None:
        """Steps of CPU workers, one after another."""
        for timeline in timelines:
            begin = self._now
            self.range("step", begin, begin + timeline.makespan_ns + 2)
            for device, row in enumerate(timeline.rows):
                for span in row:
                    at = begin + 1 + span.start_ns
                    self.range(
                        f"{span.action.kind.name} s{span.action.stage}",
                        at,
                        at + span.end_ns - span.start_ns,
                        payload(device, span.action.stage, span.action.microbatch),
                    )
            self.skip(timeline.makespan_ns + 10)

    def skip(self, ns: float) -> None:
        """Later steps begin so much later."""
        self._now += ns

    def close(self) -> None:
        """Ends writing."""
        self._tables.close()


def payload(device: int, stage: int, microbatch: int) -> int:
    return device << 48 | stage << 32 | microbatch
