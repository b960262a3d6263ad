"""The exception of a step: the first that was raised, with notes of its place and of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..notes import add_note, forget_notes, shown
from ..plan import Action
from .driver import Failure, Located


class Failures:
    """Adds notes to exceptions, which name the failed action of an executor.

    Args:
        where: names a device for messages.
    """

    def __init__(self, where: Callable[[int], str]) -> None:
        self._device = where
        # Marks the notes of this executor, which are removed when the exception is raised again.
        self._mark = object()

    def note(self, error: BaseException, text: str) -> None:
        """Adds a note, which is removed when the exception is raised again."""
        add_note(error, text, self._mark)

    def raise_first(self, failures: list[Failure], located: Located | None = None) -> None:
        """Raises the first exception, if any, with notes of its place and of later failures.

        Args:
            failures: as the driver gives them. The list is emptied.
            located: see `Located`.
        """
        if not failures:
            return
        first = self._first(failures, located)
        # The traceback holds frames that hold the list, and this one. All that stages held would be
        # held until the garbage collector finds the circle.
        failures.clear()
        try:
            raise first
        finally:
            del first

    def _first(self, failures: Sequence[Failure], located: Located | None) -> BaseException:
        first = failures[0][2]
        for _, _, error in failures:
            forget_notes(error, self._mark)
        for number, (action, device, error) in enumerate(failures):
            place, batch = action, ""
            if action is not None and located is not None:
                place, batch = located(action)
            where = self._where(place, device)
            if number > 0:
                self.note(first, f"{where} failed as well: {shown(error)}")
                continue
            if batch:
                self.note(first, f"raised in {batch}")
            if action is not None:
                self.note(first, f"raised in {where}")
        return first

    def _where(self, action: Action | None, device: int) -> str:
        if device < 0:
            return "a signal handler"
        if action is None:
            return f"{self._device(device)}, outside its actions"
        return place_of(action, device)


def place_of(action: Action, device: int, batch: str = "") -> str:
    """The name of an action on a device, with that of its batch if it has one."""
    cell = f"stage {action.stage}, microbatch {action.microbatch}"
    return f"{cell}{batch and f' of {batch}'}, action {action}, device {device}"
