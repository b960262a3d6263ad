"""Reads traces of torch.profiler back."""

from __future__ import annotations

import os

from ..profiling import Report
from ..recorded.naming import naming
from ..recorded.profile import profile_of
from .chrome_trace import events_of
from .ranges import steps_of

_REMEDY = (
    "Run steps while torch.profiler records ProfilerActivity.CPU in the thread that calls them, "
    "without a graph of the whole step"
)


def read(path: str | os.PathLike[str]) -> Report:
    """The profile of the steps in a trace of torch.profiler.

    The steps with the most frequent actions count. A backward through an output counts with its
    forward, without the time between them. On GPUs an action lasts from the start of
    its first kernel or copy there to the end of its last one; on CPU workers its range is its span.

    Args:
        path: a trace by `export_chrome_trace`, `.json` or `.json.gz`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a trace, or lacks a step of a pipeline of pykern.
    """
    events = events_of(path)
    with naming(path):
        return profile_of(steps_of(events), os.fspath(path), _REMEDY)
