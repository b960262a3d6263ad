"""Cuts models that have a forward of their own, by recording it."""

from .cut_tape import Environment
from .errors import CutError, ReplayError
from .marks import Marked, Marks
from .model import Traced
from .opened import is_list, why_whole
from .segment import Segment
from .untouched import Untouched

__all__ = [
    "CutError",
    "Environment",
    "Marked",
    "Marks",
    "ReplayError",
    "Segment",
    "Traced",
    "Untouched",
    "is_list",
    "why_whole",
]
