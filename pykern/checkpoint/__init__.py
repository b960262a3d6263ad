"""Checkpoints: a training run in one file that knows nothing of stages, devices or schedules.

Files are read as data and at worst refused; nothing in them is evaluated. The bridge to torch's
distributed checkpoints, `pykern.checkpoint.dcp`, is not imported here: that takes a second, and its
files are trusted.
"""

from .errors import CheckpointError
from .run import load, save

__all__ = ["CheckpointError", "load", "save"]
