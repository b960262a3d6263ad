"""The topology: cores, caches, memory and hand-overs of this machine, read or measured."""

from .box import Topology, measure

__all__ = ["Topology", "measure"]
