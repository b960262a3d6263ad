"""The room of GPUs for the threads of a kernel, and how many of them fit at once.

The numbers are those of the table of compute capabilities in NVIDIA's CUDA programming guide.
"""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """The room of one multiprocessor.

    Attributes:
        warps: that are resident.
        blocks: likewise.
        shared: bytes of shared memory of all blocks.
    """

    warps: int
    blocks: int
    shared: int


LIMITS = {
    80: Limits(64, 32, 164 << 10),
    90: Limits(64, 32, 228 << 10),
    100: Limits(64, 32, 228 << 10),
    120: Limits(48, 24, 100 << 10),
}
_REGISTERS = 65536
# Registers are given to a warp in pieces, and a block takes some shared memory for the system.
_PIECE, _SYSTEM = 256, 1024


def occupancy(capability: int, registers: int, shared: int, num_threads: int) -> float:
    """The share of a multiprocessor's warps that are resident, by registers and shared memory."""
    limits, warps = LIMITS[capability], num_threads // 32
    each = -(-registers * 32 // _PIECE) * _PIECE
    by_registers = _REGISTERS // each // warps
    by_shared = limits.shared // (shared + _SYSTEM)
    blocks = min(by_registers, by_shared, limits.blocks, limits.warps // warps)
    return blocks * warps / limits.warps
