"""The topology: cores, caches, memory, hand-overs and GPUs of this machine, read or measured."""

from .as_box import as_box
from .box import Topology, measure
from .gpus import MeasuredGpu
from .links import MeasuredLink
from .nvml import GpuState, Managed

__all__ = [
    "GpuState",
    "Managed",
    "MeasuredGpu",
    "MeasuredLink",
    "Topology",
    "as_box",
    "measure",
]
