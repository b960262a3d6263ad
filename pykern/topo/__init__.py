"""The topology: cores, caches, memory, hand-overs and GPUs of this machine, read or measured."""

from .box import Topology, measure
from .gpus import MeasuredGpu, MeasuredLink
from .nvml import GpuState, Managed

__all__ = ["GpuState", "Managed", "MeasuredGpu", "MeasuredLink", "Topology", "measure"]
