"""Cuts models that have a forward of their own, by recording it."""

from .errors import CutError, ReplayError
from .model import Traced
from .program import Environment, Segment

__all__ = ["CutError", "Environment", "ReplayError", "Segment", "Traced"]
