"""Warns of a forward that is recorded in step after step, and says why."""

from __future__ import annotations

from ..user_code import warn
from .state_reader import StateReader
from .tape_cache import Key

# Batches in a row that a warning waits for: the lengths of sequences may all be new for a while.
_IN_A_ROW = 16


class RecordedOften:
    """Counts the batches in a row for which a forward is recorded, and warns once.

    Args:
        reader: of the state that the forward may read.
    """

    def __init__(self, reader: StateReader) -> None:
        self._reader = reader
        self._count = 0
        self._last: tuple[int, Key] | None = None
        self._has_warned = False

    def recorded(self, batch: int, key: Key) -> None:
        """Takes note of a recording for a batch, given by its number."""
        (before, last), self._last = self._last or (batch, key), (batch, key)
        if batch == before:
            return
        self._count = self._count + 1 if batch == before + 1 else 1
        if self._count < _IN_A_ROW or self._has_warned:
            return
        self._has_warned = True
        warn(
            f"the forward was recorded for each of the last {_IN_A_ROW} batches, which takes "
            f"longer than a step. {self._reason(last, key)}"
        )

    def _reason(self, before: Key, now: Key) -> str:
        names = self._reader.changed(before[1][1], now[1][1])
        if names:
            return (
                f"The forward may read {', '.join(names)}, which changed for each batch. Hold such "
                "numbers in buffers, or outside the model if its forward does not use them"
            )
        if before[0] != now[0]:
            return (
                "Shapes of inputs, or inputs beside tensors, were new each time. Pad inputs to a "
                "few shapes, and give numbers as tensors"
            )
        return (
            "The forward reads values of tensors, as by item(), or modes, which were new each "
            "time. Keep the module that reads them whole (whole=)"
        )
