"""The doctor: the facts that decide whether, and how fast, pipelines run on this machine."""

from .diagnosis import Diagnosis, Fact
from .facts import examine

__all__ = ["Diagnosis", "Fact", "examine"]
