"""Objects that are closed when the program ends."""

from __future__ import annotations

import atexit
from typing import Protocol
from weakref import WeakSet

from ..forks import fork_safe_lock


class Closes(Protocol):
    """Runs actions until it is closed."""

    def close(self) -> None:
        """Ends the threads that run actions, and frees memory of GPUs."""


_open: WeakSet[Closes] = WeakSet()
# The set cannot be read while another thread adds to it.
_lock = fork_safe_lock()


def close_at_exit(closable: Closes) -> None:
    """Has the program close the object at its end, if the object still lives."""
    with _lock:
        _open.add(closable)


@atexit.register
def close_all() -> None:
    """Closes all. The extension closes pipelines that later handlers open."""
    with _lock:
        closables = list(_open)
    for closable in closables:
        closable.close()
