"""Locks that the child of a fork can take."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager
from weakref import WeakSet

# All locks of `fork_safe_lock` that are alive.
_locks: WeakSet[AbstractContextManager[object]] = WeakSet()


def fork_safe_lock() -> AbstractContextManager[object]:
    """A re-entrant lock, which in the child of a fork is held by the forking thread or by nobody.

    A signal handler may fork, or take the lock, while its own thread holds the lock.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _keep_own() -> None:
    """Frees the locks that other threads held: no other thread lives in the child."""
    for lock in _locks:
        if not lock._is_owned():  # type: ignore[attr-defined]
            lock._at_fork_reinit()  # type: ignore[attr-defined]


os.register_at_fork(after_in_child=_keep_own)
