"""The line of the user's script where something happens, and the library that it has called."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

_PYKERN = f"{Path(__file__).parents[1]}/"
_HERE = f"{Path(__file__).parent}/"
_TORCH = f"{Path(torch.__file__).parent}/"
# The methods of tensors that are in Python, and their way to a mode.
_OF_TENSORS = tuple(f"{_TORCH}{name}" for name in ("_tensor.py", "_tensor_str.py", "overrides.py"))
_LIBRARIES = (_PYKERN, f"{sysconfig.get_paths()['stdlib']}/", "<")
# Parts of pykern that a loop on GPUs runs as it runs here. All others know that the CPU computes.
_THE_SAME = tuple(f"{_PYKERN}{folder}/" for folder in ("models", "kernels", "optimizers"))


class Line(NamedTuple):
    """A line of the user's code.

    Attributes:
        file: its name.
        line: its number.
        inside: the library that the line has called; empty for the user's own code.
    """

    file: str
    line: int
    inside: str

    def __str__(self) -> str:
        """Such as `train.py:12, inside of transformers`."""
        return f"{self.file}:{self.line}" + (f", inside of {self.inside}" if self.inside else "")


def line_of_user() -> Line | None:
    """The innermost line of the user's code on this thread; None without any.

    A method of a tensor that the line calls is not a library.
    """
    frame = _caller()
    inside = "" if frame is None or _is_users(frame) else library_of(_module(frame))
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    if frame is None:
        return None
    return Line(Path(frame.f_code.co_filename).name, frame.f_lineno, inside)


def line_of_error(error: BaseException) -> Line | None:
    """The innermost line of the user's code that an error has passed; None without any."""
    trace, found = error.__traceback__, None
    while trace is not None:
        if _is_users(trace.tb_frame):
            found = Line(Path(trace.tb_frame.f_code.co_filename).name, trace.tb_lineno, "")
        trace = trace.tb_next
    return found


def called_by() -> str:
    """The module of a library that the running code belongs to; empty for the user's own code."""
    frame = _caller()
    return "" if frame is None or _is_users(frame) else _module(frame)


def called_by_runtime() -> bool:
    """Whether code of pykern runs that does something else where the devices are GPUs."""
    frame = _caller()
    if frame is None:
        return False
    path = frame.f_code.co_filename
    return path.startswith(_PYKERN) and not path.startswith(_THE_SAME)


def _caller() -> FrameType | None:
    """The innermost frame that is neither of this package nor of a tensor's methods."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, *_OF_TENSORS)):
        frame = frame.f_back
    return frame


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not path.startswith(_LIBRARIES) and "-packages/" not in path


def library_of(module: str) -> str:
    """The library of a module, by its name."""
    return module.partition(".")[0]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
