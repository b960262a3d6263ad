"""A profile of steps: why a step takes its time, by stage and device, and what would shorten it."""

from .observed import Observed
from .report import Report, report_of

__all__ = ["Observed", "Report", "report_of"]
