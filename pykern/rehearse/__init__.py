"""A training script, run unchanged on a box that is not there."""

from .report import Rehearsal, RehearsedPipeline
from .run import ScriptFailed, rehearse

__all__ = ["Rehearsal", "RehearsedPipeline", "ScriptFailed", "rehearse"]
