"""Cuts models that have a forward of their own, by recording it."""

from .cut_tape import Environment
from .errors import CutError, ReplayError
from .model import Traced
from .opened import why_whole
from .segment import Segment
from .untouched import Untouched

__all__ = [
    "CutError",
    "Environment",
    "ReplayError",
    "Segment",
    "Traced",
    "Untouched",
    "why_whole",
]
