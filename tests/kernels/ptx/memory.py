"""Memory whose accesses are judged: their bounds, what was never written, and races."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
# In the place of a thread: none so far, or several.
_NOBODY, _SEVERAL = -1, -2


class MemoryFault(Exception):
    """An access that no kernel may make."""

    def __init__(self, what: str, index: int) -> None:
        super().__init__(what)
        self.index = index


class Region:
    """Bytes at an address.

    Attributes:
        base: address of the first byte.
        content: uint8, the bytes themselves.
        allowed: whether a kernel may touch a byte.
        written: whether a byte has a value.
        touched_by_reads: whether this launch has read a byte.
        touched_by_writes: whether it has written one.
    """

    def __init__(self, base: int, content: NDArray[np.uint8], name: str) -> None:
        self.base, self.content, self.name = base, content, name
        self.allowed = np.zeros(content.size, bool)
        self.written = np.zeros(content.size, bool)
        self.begin()

    def begin(self) -> None:
        """Forgets who touched what: launches come one after another."""
        size = self.content.size
        self.touched_by_reads, self.touched_by_writes = np.zeros((2, size), bool)
        self._writer, self._reader = np.full((2, size), _NOBODY, np.int64)
        self._write_epoch, self._read_epoch = np.zeros((2, size), np.int64)
        self._first_reader = np.full(size, np.iinfo(np.int64).max)
        self._last_reader = np.full(size, _NOBODY, np.int64)

    def read(self, addresses: Integers, width: int, who: Threads) -> NDArray[np.uint8]:
        """Bytes [threads, width].

        Raises:
            MemoryFault: a byte is out of bounds, has no value, or is written by another thread
                that no barrier orders.
        """
        places = self._places(addresses, width)
        _raise(f"read of {self.name} that nothing wrote", ~self.written[places])
        threads, epochs = who.threads[:, None], who.epochs[:, None]
        writer = self._writer[places]
        unordered = who.unordered(writer, self._write_epoch[places], threads, epochs)
        _raise(f"race: read of {self.name} beside a write", unordered & (writer != threads))
        known = self._read_epoch[places] == epochs
        known &= self._reader[places] != _NOBODY
        several = known & (self._reader[places] != threads)
        reader = np.where(several, _SEVERAL, np.broadcast_to(threads, places.shape))
        self._reader[places], self._read_epoch[places] = reader, epochs
        # One of several threads that read a byte at once was noted.
        other = (self._reader[places] != reader) & (reader != _SEVERAL)
        self._reader[places[other]] = _SEVERAL
        np.minimum.at(self._first_reader, places, threads)
        np.maximum.at(self._last_reader, places, threads)
        self.touched_by_reads[places] = True
        return self.content[places]

    def write(self, addresses: Integers, values: NDArray[np.uint8], who: Threads) -> None:
        """Stores bytes [threads, width]. Several threads may write the same value.

        Raises:
            MemoryFault: a byte is out of bounds, or another thread touches it that no barrier
                orders.
        """
        places = self._places(addresses, values.shape[1])
        threads, epochs = who.threads[:, None], who.epochs[:, None]
        writer, reader = self._writer[places], self._reader[places]
        unordered = who.unordered(writer, self._write_epoch[places], threads, epochs)
        differs = (writer != threads) & (self.content[places] != values)
        _raise(f"race: two writes of {self.name}", unordered & differs)
        unordered = who.unordered(reader, self._read_epoch[places], threads, epochs)
        _raise(f"race: write of {self.name} beside a read", unordered & (reader != threads))
        far = self._last_reader[places] != _NOBODY
        far &= who.in_other_block(self._first_reader[places], threads) | who.in_other_block(
            self._last_reader[places], threads
        )
        _raise(f"race: write of {self.name} that another block reads", far)
        self.content[places], self.written[places] = values, True
        _raise(f"race: two writes of {self.name}", self.content[places] != values)
        self._writer[places], self._write_epoch[places] = threads, epochs
        # Equal values of several threads: to read them is right for none but the last one.
        self._writer[places[self._writer[places] != threads]] = _SEVERAL
        self.touched_by_writes[places] = True

    def _places(self, addresses: Integers, width: int) -> Integers:
        places = addresses[:, None] - self.base + np.arange(width)
        inside = (places >= 0) & (places < self.content.size)
        inside &= self.allowed[np.where(inside, places, 0)]
        _raise(f"out of bounds of {self.name}", ~inside)
        return places


class Threads:
    """The threads that make an access.

    Attributes:
        threads: [n], their numbers in the grid.
        epochs: [n], how many barriers the blocks of the threads have passed.
        block: threads in a block.
    """

    def __init__(self, threads: Integers, epochs: Integers, block: int) -> None:
        self.threads, self.epochs, self.block = threads, epochs, block

    def unordered(
        self, others: Integers, when: Integers, threads: Integers, epochs: Integers
    ) -> NDArray[np.bool_]:
        """Whether nothing orders accesses of other threads and of these, if they differ."""
        same = (others == _SEVERAL) | (others // self.block == threads // self.block)
        return (others != _NOBODY) & (~same | (when == epochs))

    def in_other_block(self, others: Integers, threads: Integers) -> NDArray[np.bool_]:
        return others // self.block != threads // self.block


class Space:
    """Regions that addresses lead to."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def read(self, addresses: Integers, width: int, who: Threads) -> NDArray[np.uint8]:
        result = np.empty((addresses.size, width), np.uint8)
        for region, chosen in self._parts(addresses, width):
            part = Threads(who.threads[chosen], who.epochs[chosen], who.block)
            with _placed(chosen):
                result[chosen] = region.read(addresses[chosen], width, part)
        return result

    def write(self, addresses: Integers, values: NDArray[np.uint8], who: Threads) -> None:
        for region, chosen in self._parts(addresses, values.shape[1]):
            part = Threads(who.threads[chosen], who.epochs[chosen], who.block)
            with _placed(chosen):
                region.write(addresses[chosen], values[chosen], part)

    def _parts(self, addresses: Integers, width: int) -> list[tuple[Region, Integers]]:
        _raise(f"not a multiple of {width} bytes", (addresses % width != 0)[:, None])
        parts, left = [], np.ones(addresses.size, bool)
        for region in self.regions:
            here = (addresses >= region.base) & (addresses < region.base + region.content.size)
            if here.any():
                parts.append((region, np.flatnonzero(here)))
                left &= ~here
        _raise("out of bounds: in no tensor", left[:, None])
        return parts


class _placed:
    """Counts the thread of a fault among all threads, where it was counted among some."""

    def __init__(self, chosen: Integers) -> None:
        self._chosen = chosen

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: object, __: object) -> None:
        if isinstance(error, MemoryFault):
            error.index = int(self._chosen[error.index])


def _raise(what: str, wrong: NDArray[np.bool_]) -> None:
    if wrong.any():
        raise MemoryFault(what, int(np.flatnonzero(wrong.any(1))[0]))
