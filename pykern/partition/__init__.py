"""A model as a chain of layers, cut into stages."""

from .balance import Balance, Partition, partition

__all__ = ["Balance", "Partition", "partition"]
