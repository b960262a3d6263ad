"""Executors that are closed when the program ends."""

from __future__ import annotations

import atexit
from typing import TYPE_CHECKING
from weakref import WeakSet

from ..forks import fork_safe_lock

if TYPE_CHECKING:
    from .executor import Executor

_open: WeakSet[Executor] = WeakSet()
# The set cannot be read while another thread adds to it.
_lock = fork_safe_lock()


def close_at_exit(executor: Executor) -> None:
    """Has the program close the executor at its end, if the executor still lives."""
    with _lock:
        _open.add(executor)


@atexit.register
def close_all() -> None:
    """Closes all. The extension closes pipelines that later handlers open."""
    with _lock:
        executors = list(_open)
    for executor in executors:
        executor.close()
