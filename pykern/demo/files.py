"""The file that the demo reads and the folder that it writes, refused before torch is loaded."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def require_text_file(path: Path) -> None:
    """Refuses what is not a regular file.

    Raises:
        ValueError: If it is not a regular file.
        OSError: If it is not there.
    """
    # Looking before opening: opening a pipe would wait for a writer that may never come.
    if not stat.S_ISREG(path.stat().st_mode):
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise ValueError(f"path must be a text file, got {path}, which is {kind}")


def require_usable(out: Path) -> None:
    """Refuses a folder that cannot be written to, if there is something by that name.

    Raises:
        ValueError: If `out` is not a folder, or may not be written to.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"--out must be a folder, got the file {out}")
    if not os.access(out, os.W_OK):
        raise ValueError(
            f"--out must be a folder that may be written to, got {out}. Choose another folder"
        )


def make_folder(out: Path) -> None:
    """Makes the folder for the demo's files.

    Raises:
        OSError: If the folder cannot be made.
        ValueError: If it cannot be written to.
    """
    out.mkdir(parents=True, exist_ok=True)
    require_usable(out)
