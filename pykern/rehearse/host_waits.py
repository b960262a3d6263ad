"""The places where the host waits for a GPU."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from ..attributes import replaced
from ..plan import Kind
from .lines import Line, called_by, called_by_runtime, library_of, line_of_user


class HostWait(NamedTuple):
    """A place where the host waits.

    Attributes:
        line: the user's line.
        call: the function that waits, such as `item`.
        action: kind and stage of the pipeline's action that calls it; empty outside of actions.
    """

    line: Line
    call: str
    action: str


class _ActionOfThread(threading.local):
    """The action that a thread runs; empty outside of actions."""

    action = ""


class HostWaits:
    """Counts them, on the threads of the script and of the workers.

    Attributes:
        found: how often the host waits, by place.
    """

    def __init__(self) -> None:
        self.found: Counter[HostWait] = Counter()
        self._thread = _ActionOfThread()
        # The line that runs the step under way, for layers that are not the user's own code.
        self._step: Line | None = None
        self._is_silent = False

    @property
    def acting(self) -> bool:
        """Whether the thread runs an action of a pipeline."""
        return bool(self._thread.action)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of a pipeline that the user's line runs."""
        self._step = line_of_user()
        try:
            yield
        finally:
            # Another thread's may have begun in between.
            self._step = None

    def action(self, kind: Kind, stage: int) -> AbstractContextManager[None]:
        """An action of that step, on this thread."""
        return replaced(self._thread, "action", f"{kind.name} of stage {stage}")

    @contextmanager
    def trial(self) -> Iterator[None]:
        """A run of actions that a step on GPUs would not have; its waits do not count."""
        with replaced(self, "_is_silent", True), replaced(self._thread, "action", "a trial"):
            yield

    def note(self, call: str) -> None:
        """The code that runs waits for a GPU, by this function."""
        if self._is_silent or called_by_runtime():
            return
        line = line_of_user()
        if line is None:
            # A worker, in layers of a library: the line is that of the step.
            line = (self._step or Line("?", 0, ""))._replace(inside=library_of(called_by()))
        self.found[HostWait(line, call, self._thread.action)] += 1
