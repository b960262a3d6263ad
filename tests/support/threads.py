"""The threads of this process, by name."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path


def threads(name: str) -> set[int]:
    """The ids of the threads whose names begin so."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end between the two looks: it has no name any more.
        with suppress(OSError):
            if (task / "comm").read_text().startswith(name):
                found.add(int(task.name))
    return found


def workers() -> set[int]:
    """The threads that run stages."""
    return threads("pykern dev")


def await_end(those: set[int]) -> None:
    """Waits until these workers have ended: a process lists a thread a moment after its join."""
    deadline = time.monotonic() + 5
    while left := those & workers():
        assert time.monotonic() < deadline, left
        time.sleep(0.001)
