"""The best plan for given costs under a limit of memory."""

from .search import Found, auto, placement_name, placements, published, wave_of

__all__ = ["Found", "auto", "placement_name", "placements", "published", "wave_of"]
