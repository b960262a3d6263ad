"""Contexts that prevent events which would break a capture."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nothing_cached() -> Iterator[None]:
    """Turns autocast's cache off, which would pass one graph's cast weights to all others."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


@contextmanager
def no_collection() -> Iterator[None]:
    """Turns garbage collection off: freeing graphs or events would break a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
