"""Numbers and sizes of blocks on the host, where Triton's own functions take microseconds."""

from __future__ import annotations


def cdiv(size: int, block: int) -> int:
    """The number of blocks that cover a size."""
    return -(-size // block)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is at least a size; the size is at least 1."""
    return 1 << (size - 1).bit_length()
