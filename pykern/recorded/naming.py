"""Errors of a recording, which name its file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """A context in which each ValueError names the file, by a name in front if by nothing else."""
    try:
        yield
    except ValueError as error:
        if Path(path).name in str(error):
            raise
        raise ValueError(f"{os.fspath(path)}: {error}") from error
