"""Reads traces of torch.profiler back, as timelines and as a profile."""

from .read import read

__all__ = ["read"]
