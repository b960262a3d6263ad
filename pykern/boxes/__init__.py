"""Profiles of boxes: the memory, speeds and links of their devices, measured or published."""

from .box import Box, BoxDevice, BoxHost, BoxLink
from .files import load, published, save

__all__ = ["Box", "BoxDevice", "BoxHost", "BoxLink", "load", "published", "save"]
