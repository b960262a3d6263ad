"""The user's line: where the code that called pykern is, for messages and warnings."""

from __future__ import annotations

import sys
import warnings
from itertools import count
from pathlib import Path
from types import FrameType

import torch

_PYKERN = Path(__file__).parent
# Models and kernels are called by a user's forward, as code of its own.
_USERS = tuple(f"{_PYKERN / folder}/" for folder in ("models", "kernels"))
_NOT_USERS = (f"{_PYKERN}/", f"{Path(torch.__file__).parent}/")


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path.startswith(_USERS) or not path.startswith(_NOT_USERS)


def _depth() -> int:
    """How many frames above the caller's the innermost frame of the user's code is."""
    frame = sys._getframe(2)
    for depth in count():
        if _is_users(frame) or frame.f_back is None:
            return depth
        frame = frame.f_back
    raise AssertionError("frames end")


def user_line() -> str:
    """The file and line of the user's code that is running, such as `model.py:12`."""
    frame = sys._getframe(1 + _depth())
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def warn(message: str, prefix: str = "pykern: ") -> None:
    """Gives a UserWarning at the user's line."""
    warnings.warn(f"{prefix}{message}", stacklevel=2 + _depth())
