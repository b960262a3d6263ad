"""A disk that is full."""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """A context in which no file gets longer than this.

    Python compiles no module meanwhile: it would keep the part of it that has been written, and
    fail to import the module for ever after.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    compiles_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        sys.dont_write_bytecode = compiles_none
