"""The best plan for given costs under a limit of memory."""

from .catalogue import placement_name, placements, published, wave_of
from .search import Found, auto

__all__ = ["Found", "auto", "placement_name", "placements", "published", "wave_of"]
