"""Profiles of boxes: the memory, speeds and links of their devices, measured or published."""

from .box import Box, BoxDevice, BoxHost, BoxLink, RateBySize
from .files import load, published, save
from .heat_map import save_heat_map
from .links import over_links, slowest

__all__ = [
    "Box",
    "BoxDevice",
    "BoxHost",
    "BoxLink",
    "RateBySize",
    "load",
    "over_links",
    "published",
    "save",
    "save_heat_map",
    "slowest",
]
