"""The fastest pipeline of a model on the devices at hand: measured, searched, and tried."""

from .choice import Choice
from .proposal import Proposal
from .run import TuneInterrupted, tune

__all__ = ["Choice", "Proposal", "TuneInterrupted", "tune"]
