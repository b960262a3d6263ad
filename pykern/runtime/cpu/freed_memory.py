"""Memory that steps on CPU workers free stays with the process, for the next step."""

from __future__ import annotations

import ctypes
import os
from functools import cache

# From malloc.h, with the values that glibc allows at most where it has a limit.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {_M_TRIM_THRESHOLD: 2**30, _M_TOP_PAD: 2**26, _M_MMAP_THRESHOLD: 2**25}
_BY_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")


@cache
def keep_freed_memory() -> None:
    """Has glibc keep freed memory, unless the environment sets how it does so.

    A step frees in its end what it has kept for backwards. glibc gives such memory back to the
    system, which fills it with zeros, page by page, when the next step writes to it.
    """
    if any(name in os.environ for name in _BY_USER) or "malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for name, value in _SETTINGS.items():
        mallopt(name, value)
