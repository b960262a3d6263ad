"""Reads reports of Nsight Systems back."""

from __future__ import annotations

import os
import sqlite3

from ..profiling import Report
from ..recorded.naming import naming
from ..recorded.profile import profile_of
from .export import tables_of
from .tables import num_cores, steps_of


def read(path: str | os.PathLike[str]) -> Report:
    """The profile of the steps in a report of Nsight Systems.

    The steps with the most frequent actions count. A backward through an output counts with its
    forward, without the time between them. On GPUs an action lasts from the start of
    its first kernel or copy there to the end of its last one; on CPU workers its range is its span.

    Args:
        path: a `.nsys-rep` report, which needs the command `nsys`, or its `.sqlite` export.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a report, or lacks a step of a pipeline of pykern.
    """
    with naming(path), tables_of(path) as tables:
        try:
            steps, cores = steps_of(tables), num_cores(tables)
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"the report must have the tables of Nsight Systems, got {os.fspath(path)}: "
                f"{error}. Export it anew: nsys export --type sqlite"
            ) from error
        remedy = "Record with --trace=nvtx, and without a graph of the whole step"
        return profile_of(steps, os.fspath(path), remedy, cores)
