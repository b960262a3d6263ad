"""The memory of a training step, known before there are weights, data or devices."""

from .estimates import Bytes, Estimate, estimate

__all__ = ["Bytes", "Estimate", "estimate"]
