"""Records steps with Nsight Systems, and reads its reports back, as timelines and as a profile."""

from .profile import read
from .record import record

__all__ = ["read", "record"]
