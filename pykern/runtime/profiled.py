"""Ranges of actions in profiles of torch.profiler."""

from __future__ import annotations

from .. import _C
from ..torch_private import profiler


def follow_profiler() -> None:
    """Has actions reach torch.profiler from now on if it records, and not otherwise.

    A driver calls it when it begins a step: an action asks for nothing.
    """
    if profiler.is_recording():
        _C.set_torch_ranges(*profiler.range_functions(), profiler.records_all_threads())
    else:
        _C.set_torch_ranges(0, 0, False)
