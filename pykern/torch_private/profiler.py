"""torch's profiler: whether it records, and the functions of C that tell it of ranges."""

from __future__ import annotations

from ctypes import CDLL, c_void_p, cast
from functools import cache
from pathlib import Path

import torch
from torch.autograd import profiler


def is_recording() -> bool:
    """Whether a profile of torch.profiler is recorded, by any thread."""
    return bool(profiler._is_profiler_enabled)


def records_all_threads() -> bool:
    """Whether the profile that is recorded has all threads, and not the one alone that asks."""
    return not torch._C._autograd._profiler_enabled()


@cache
def range_functions() -> tuple[int, int]:
    """The addresses of the functions of torch's C interface that begin a range, and end it."""
    library = CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
    start, end = library.aoti_record_function_start, library.aoti_record_function_end
    return cast(start, c_void_p).value or 0, cast(end, c_void_p).value or 0
