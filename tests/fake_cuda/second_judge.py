"""A judge that others wrote: torch's own sanitizer for streams reads what the fake driver did.

The driver's model and `torch.cuda._sanitizer.EventHandler` both find work on the same memory that
nothing orders. They have no line in common: the model has vector clocks and ranges of bytes, and
the sanitizer has numbers of kernels and addresses. So memory is cut at all ends of ranges, and a
piece counts by its address.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import takewhile
from traceback import StackSummary
from typing import NamedTuple
from unittest.mock import patch

import torch

# The import alone would have torch call Python for each of its events, where there is a GPU.
with patch.object(torch._C, "_activate_gpu_trace"):
    from torch.cuda._sanitizer import EventHandler

# An event of no stream of the log, for what the host waits for without one.
_WAITED_FOR = -1
RACES = ("race on", "freed while in use", "launched while running", "race in a graph")


class Touch(NamedTuple):
    """A range of bytes that work reads or writes."""

    writes: bool
    address: int
    num_bytes: int


class Verdict(NamedTuple):
    """The lines of the log whose work races with earlier work, by the driver and by torch."""

    driver: list[int]
    torch: list[int]


def agree(log: Sequence[str]) -> Verdict:
    """Has both judge a log.

    Behind a race that both see, the driver may see more: of a write it asks whether it follows the
    last write too, where torch asks about the reads since, some of which did not follow it.

    Raises:
        AssertionError: they differ in anything else.
    """
    ours, theirs = verdict_of_driver(log), verdict_of_torch(log)
    assert set(theirs) <= set(ours), f"only torch sees races: {told(log, theirs, ours)}"
    assert ours[:1] == theirs[:1], f"only the driver sees races: {told(log, ours, theirs)}"
    return Verdict(ours, theirs)


def told(log: Sequence[str], one: list[int], other: list[int]) -> list[str]:
    """The first few lines that are in one verdict alone, with the number of each."""
    return [f"{number}: {log[number]}" for number in one if number not in other][:3]


def verdict_of_driver(log: Sequence[str]) -> list[int]:
    """The lines of the work that the driver's model has told of."""
    found, number = [], 0
    for at, line in enumerate(log):
        if not line.startswith("told"):
            number = at if not line.startswith("node") else number
        elif any(race in line for race in RACES) and number not in found:
            found.append(number)
    return found


def verdict_of_torch(log: Sequence[str]) -> list[int]:
    """The lines of the work that torch's sanitizer tells of."""
    judge = _Judge(log)
    # The stack of this function, for each kernel, takes longer than all else and says nothing.
    with patch.object(StackSummary, "extract", lambda *_, **__: StackSummary()):
        return [number for number, line in enumerate(log) if judge.is_race(number, line)]


class _Judge:
    def __init__(self, log: Sequence[str]) -> None:
        self._log = log
        self._torch = EventHandler()
        # Streams that have been given something since the host last waited for them: waiting for
        # the others tells torch nothing, and takes it long.
        self._busy: set[str] = set()
        self._accesses = [_accesses_of(line) for line in log]
        accesses = (access for found in self._accesses for access in found)
        ends = {end for _, start, size in accesses for end in (start, start + size)}
        self._ends = sorted(ends)
        # By start and size: work touches the same ranges again and again.
        self._pieces_of: dict[tuple[int, int], list[int]] = {}

    def is_race(self, number: int, line: str) -> bool:
        """Gives torch a line, in order; whether it tells of a race."""
        match line.split():
            case ["work", function, stream, *_]:
                return self._launch(stream, function, self._accesses[number])
            case ["record", event, stream]:
                self._torch._handle_event_record(int(event), _name(stream))
            case ["wait", event, stream]:
                self._busy.add(stream)
                self._torch._handle_event_wait(int(event), _name(stream))
            case ["host", *what]:
                self._host_waits(what)
            case ["free", stream, *_]:
                # The owner may use it again at once, as if it wrote.
                found = self._launch(stream, "free", self._accesses[number])
                self._forget(self._accesses[number])
                return found
            case ["forget", *_]:
                self._forget(self._accesses[number])
            case ["graph"]:
                return self._races_within(number)
        return False

    def _host_waits(self, what: list[str]) -> None:
        match what:
            case ["event", event]:
                self._host_waits_for(int(event))
            case ["stream", stream] if stream in self._busy:
                self._busy.remove(stream)
                self._torch._handle_event_record(_WAITED_FOR, _name(stream))
                self._host_waits_for(_WAITED_FOR)
            case ["all"]:
                self._torch._handle_device_synchronization()

    def _host_waits_for(self, event: int) -> None:
        """Every stream knows all that the host knows, so torch is given what is new of an event."""
        syncs = self._torch.syncs
        syncs._ensure_event_exists(event)
        known, recorded = syncs.host_sync_state, syncs.recorded_sync_states
        recorded[event] = {
            stream: number
            for stream, number in recorded[event].items()
            if number > known.get(stream, -1)
        }
        self._torch._handle_event_synchronization(event)

    def _launch(self, stream: str, function: str, accesses: Iterable[Touch]) -> bool:
        self._busy.add(stream)
        return _races(self._torch, _name(stream), function, self._pieces(accesses))

    def _forget(self, accesses: Iterable[Touch]) -> None:
        for piece in self._pieces(accesses):
            self._torch._handle_memory_deallocation(piece)

    def _pieces(self, accesses: Iterable[Touch]) -> dict[int, bool]:
        """By the address of each piece, whether it is written."""
        pieces: dict[int, bool] = {}
        for writes, start, size in accesses:
            if (start, size) not in self._pieces_of:
                first, behind = (bisect_left(self._ends, end) for end in (start, start + size))
                self._pieces_of[start, size] = self._ends[first:behind]
            for piece in self._pieces_of[start, size]:
                pieces[piece] = pieces.get(piece, False) or writes
        return pieces

    def _races_within(self, graph: int) -> bool:
        """Whether nodes of a graph race, each of which is on a stream of its own."""
        judge, found = EventHandler(), False
        nodes = takewhile(lambda line: line.startswith("node"), self._log[graph + 1 :])
        for number, line in enumerate(nodes):
            for former in _words_of(line)[1:]:
                judge._handle_event_wait(int(former), _name(number))
            pieces = self._pieces(self._accesses[graph + 1 + number])
            found |= _races(judge, _name(number), "node", pieces)
            judge._handle_event_record(number, _name(number))
        return found


def _races(judge: EventHandler, stream: int, function: str, pieces: dict[int, bool]) -> bool:
    reads, writes = (
        {piece for piece, written in pieces.items() if written is kind} for kind in (False, True)
    )
    aliases: dict[int, list[str]] = {piece: [] for piece in pieces}
    return bool(judge._handle_kernel_launch(stream, reads, writes, set(), function, aliases))


def _name(stream: int | str) -> int:
    """torch has a stream 0 from the start."""
    return int(stream) + 1


def _words_of(line: str) -> list[str]:
    """The words before the accesses."""
    return re.split(" [rw] ", line, maxsplit=1)[0].split()


def _accesses_of(line: str) -> list[Touch]:
    what = line.partition(" ")[0]
    if what in ("free", "forget"):
        address, num_bytes = map(int, line.split()[-2:])
        return [Touch(True, address, num_bytes)]
    if what not in ("work", "node"):
        return []
    found = re.findall(r" ([rw]) (\d+) (\d+)", line)
    return [Touch(kind == "w", int(start), int(size)) for kind, start, size in found]
