"""Records steps with Nsight Systems, and reads its reports back, as timelines and as a profile."""

from .read import read
from .record import record

__all__ = ["read", "record"]
