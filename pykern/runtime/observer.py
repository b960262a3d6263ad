"""What is told of steps."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """What follows every step from its begin to its end."""

    def begin(self) -> None:
        """A step begins."""

    def succeed(self) -> None:
        """It has succeeded, and is about to end."""

    def end(self) -> None:
        """It has ended, or failed, perhaps before it began. May come twice."""
