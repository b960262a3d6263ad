"""Profiles of boxes: the memory, speeds and links of their devices, measured or published.

Only `save_heat_map` needs what draws, so it is imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .box import Box, BoxDevice, BoxHost, BoxLink, RateBySize
from .files import load, published, save
from .links import over_links, slowest

if TYPE_CHECKING:
    from .heat_map import save_heat_map

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


def __getattr__(name: str) -> Any:
    if name != "save_heat_map":
        raise AttributeError(f"module 'pykern.boxes' has no attribute {name!r}")
    return import_module(".heat_map", __name__).save_heat_map
