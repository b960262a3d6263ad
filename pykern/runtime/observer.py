"""The interface of observers of steps."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """An observer of every step from its begin to its end."""

    def begin_run(self) -> None:
        """A step begins."""

    def succeed_run(self) -> None:
        """The step has succeeded, and is about to end."""

    def end_run(self) -> None:
        """The step has ended or failed, perhaps before its begin. May be called twice."""
