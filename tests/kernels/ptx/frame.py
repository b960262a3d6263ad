"""The state of a launch: registers and memory of all threads, and what they have executed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.kernels.ptx.kinds import KINDS, RAW, Kind, Numbers, immediate
from tests.kernels.ptx.memory import MemoryFault, Region, Space, Threads
from tests.kernels.ptx.parsed import Address, Kernel, Operand, UnknownPtx

# Where shared memory begins; an address of zero is out of bounds. Each thread has local memory at
# addresses that no tensor of a process has.
SHARED, LOCAL = 1024, 1 << 40
_SECTOR = 32


@dataclass
class Counts:
    """Counts of a launch.

    Attributes:
        threads: instructions, each counted for every thread that executes it.
        warps: instructions, each counted once for a warp.
        loads: of global memory, counted for warps.
        stores: likewise.
        loaded: bytes of the 32-byte sectors that these loads ask for, warp by warp.
        stored: likewise.
        opcodes: of all, counted for warps.
    """

    threads: int = 0
    warps: int = 0
    loads: int = 0
    stores: int = 0
    loaded: int = 0
    stored: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)


class Frame:
    """The state of a launch.

    Attributes:
        mask: the threads that execute the current instruction.
        registers: by name, [threads].
    """

    def __init__(
        self, kernel: Kernel, grid: tuple[int, int, int], size: int, shared: int, space: Space
    ) -> None:
        self.kernel, self.size, self.space = kernel, size, space
        self.num_blocks = grid[0] * grid[1] * grid[2]
        self.num_threads = self.num_blocks * size
        self.mask = np.ones(self.num_threads, bool)
        self.counts = Counts()
        self.registers: dict[str, Numbers] = {}
        self.arguments: dict[str, int] = {}
        self.numbers = np.arange(self.num_threads)
        self.block = self.numbers // size
        self.epochs = np.zeros(self.num_blocks, np.int64)
        self.shared = Region(0, np.zeros(self.num_blocks * shared, np.uint8), "shared memory")
        self.shared.allowed[:] = True
        self.shared_size = shared
        num_bytes = self.num_threads * kernel.local
        self.local = Region(0, np.zeros(num_bytes, np.uint8), "local memory")
        self.local.allowed[:] = True
        x, y, _ = grid
        self.special = {
            "%tid.x": self.numbers % size,
            "%ctaid.x": self.block % x,
            "%ctaid.y": self.block // x % y,
            "%ctaid.z": self.block // (x * y),
            **{
                f"%nctaid.{name}": np.full(self.num_threads, n)
                for name, n in zip("xyz", grid, strict=True)
            },
        }

    def raw(self, operand: Operand, kind: Kind) -> Numbers:
        """The bits of an operand: of all threads, or of one if all have the same."""
        assert isinstance(operand, str)
        if operand in self.registers:
            value = self.registers[operand]
            return value if value.itemsize <= max(kind.width, 1) else value.astype(RAW[kind.width])
        if operand in self.special:
            return self.special[operand].astype(RAW[kind.width])
        if operand in ("global_smem", "__local_depot0"):
            return np.array([SHARED if operand == "global_smem" else LOCAL], RAW[kind.width])
        if operand[0] in "-0123456789":
            return immediate(operand, kind)
        raise UnknownPtx(f"{operand} has no value")

    def has_value(self, operand: str) -> bool:
        """Whether an operand is not a register that nothing has written."""
        return not operand.startswith("%") or operand in self.registers

    def read(self, operand: Operand, kind: str) -> Numbers:
        found = KINDS[kind]
        raw = self.raw(operand, found)
        if raw.itemsize < found.width:
            raise UnknownPtx(f"{operand} is no {kind}")
        return found.decode(raw)

    def write(self, operand: Operand, kind: str, values: Numbers) -> None:
        self.put(operand, KINDS[kind].encode(np.asarray(values)))

    def put(self, operand: Operand, raw: Numbers) -> None:
        """Writes bits into a register of the threads of the mask."""
        assert isinstance(operand, str)
        dtype = RAW[self.kernel.width(operand)]
        raw = np.broadcast_to(raw.astype(dtype), self.num_threads)
        if not self.mask.all():
            before = self.registers.get(operand)
            raw = np.where(self.mask, raw, np.zeros(1, dtype) if before is None else before)
        self.registers[operand] = np.ascontiguousarray(raw)

    def address(self, operand: Operand) -> NDArray[np.int64]:
        """Addresses of the threads of the mask."""
        assert isinstance(operand, Address)
        width = 4 if operand.base == "global_smem" else self.kernel.width(operand.base)
        base = self.raw(operand.base, KINDS[f"u{8 * width}"]).astype(np.int64)
        return np.broadcast_to(base + operand.offset, self.num_threads)[self.mask]

    def who(self) -> Threads:
        chosen = self.numbers[self.mask]
        return Threads(chosen, self.epochs[chosen // self.size], self.size)

    def _own(
        self, space: str, addresses: NDArray[np.int64], width: int
    ) -> tuple[Region, NDArray[np.int64]]:
        """The shared memory of all blocks, or the local one of all threads, and places in it."""
        if space == "shared":
            region, base, size, owners = self.shared, SHARED, self.shared_size, self.block
        else:
            region, base, size, owners = self.local, LOCAL, self.kernel.local, self.numbers
        places = addresses - base
        outside = (places < 0) | (places + width > size) | (places % width != 0)
        if outside.any():
            index = int(np.flatnonzero(outside)[0])
            raise MemoryFault(f"out of bounds of {space} memory, or not aligned", index)
        return region, places + owners[self.mask] * size

    def load(self, space: str, addresses: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
        if space == "global":
            return self.space.read(addresses, width, self.who())
        region, places = self._own(space, addresses, width)
        return region.read(places, width, self.who())

    def store(self, space: str, addresses: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        if space == "global":
            self.space.write(addresses, values, self.who())
        else:
            region, places = self._own(space, addresses, values.shape[1])
            region.write(places, values, self.who())

    def count_global(self, addresses: NDArray[np.int64], width: int, *, stores: bool) -> None:
        warps = self.numbers[self.mask] // 32
        num_warps = np.unique(warps).size
        sectors = np.concatenate([addresses // _SECTOR, (addresses + width - 1) // _SECTOR])
        pairs = np.stack([np.concatenate([warps, warps]), sectors])
        order = np.lexsort(pairs)
        pairs = pairs[:, order]
        num_bytes = _SECTOR * int(1 + np.any(pairs[:, 1:] != pairs[:, :-1], 0).sum())
        if stores:
            self.counts.stores += num_warps
            self.counts.stored += num_bytes
        else:
            self.counts.loads += num_warps
            self.counts.loaded += num_bytes
