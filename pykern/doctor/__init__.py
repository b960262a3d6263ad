"""The doctor: the facts that decide whether, and how fast, pipelines run on this machine."""

from .examine import examine
from .report import Fact, Report

__all__ = ["Fact", "Report", "examine"]
