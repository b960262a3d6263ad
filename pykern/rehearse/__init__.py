"""A training script, run unchanged on a box that is not there."""

from ..script import ScriptFailed
from .report import Rehearsal, RehearsedPipeline
from .run import rehearse

__all__ = ["Rehearsal", "RehearsedPipeline", "ScriptFailed", "rehearse"]
