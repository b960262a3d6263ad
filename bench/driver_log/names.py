"""Names in the place of addresses, by the order in which they come, so that two logs compare.

An object is KIND and its number, 0 for null; one that is destroyed ends, and its address is another
object's from then on. Bytes are BUFFER+OFFSET, where ranges that overlap are one buffer; the log
begins with the size of each.
"""

from __future__ import annotations

import re
from collections import Counter

_OBJECT = re.compile(r"(\*?)\b([a-z]+)@([0-9a-f]+)")
_RANGE = re.compile(r"buffer@([0-9a-f]+):(\d+)")
_COPY = re.compile(r"buffer@([0-9a-f]+)[ ,]buffer@([0-9a-f]+)[ ,](\d+)")
_DESTROYS = re.compile(r"cu\w+Destroy [a-z]+@([0-9a-f]+)")


class _Buffers:
    """Ranges of bytes that have names."""

    def __init__(self, raw: str) -> None:
        ranges = [(int(at, 16), int(size)) for at, size in _RANGE.findall(raw)]
        for to, source, size in _COPY.findall(raw):
            ranges += [(int(to, 16), int(size)), (int(source, 16), int(size))]
        self._ends: dict[int, int] = {}
        start = end = -1
        for at, size in sorted(ranges):
            if at >= end:
                start = at
            end = self._ends[start] = max(end, at + size)
        self._numbers: dict[int, int] = {}

    def name(self, address: int) -> str:
        start = max(start for start in self._ends if start <= address)
        number = self._numbers.setdefault(start, len(self._numbers) + 1)
        return f"buffer{number}+{address - start}"

    def sizes(self) -> str:
        """The bytes of all that have names, in the order of their numbers."""
        return " ".join(str(self._ends[start] - start) for start in self._numbers)


def named(raw: str) -> str:
    """A log by names, from one by addresses."""
    buffers = _Buffers(raw)
    objects: dict[tuple[str, str], str] = {}
    made: Counter[str] = Counter()

    def name(found: re.Match[str]) -> str:
        told, kind, address = found.groups()
        if kind == "buffer":
            return buffers.name(int(address, 16))
        if int(address, 16) == 0:
            return f"{told}{kind}0"
        # Contexts are told again and again, other objects where they are made.
        if (kind, address) not in objects or (told and kind != "ctx"):
            made[kind] += 1
            objects[kind, address] = f"{kind}{made[kind]}"
        return told + objects[kind, address]

    lines = []
    for line in raw.splitlines():
        lines.append(_OBJECT.sub(name, line))
        for address in _DESTROYS.findall(line):
            for key in [key for key in objects if key[1] == address]:
                del objects[key]
    return "\n".join([f"buffers {buffers.sizes()}", *lines]) + "\n"
