"""The bandwidth and latency of copies between GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from shutil import which

import torch
from torch import Tensor

from .. import _C
from ..runtime.gpu.peers import pattern_of
from . import timed


@dataclass(frozen=True)
class MeasuredLink:
    """The way from one GPU to another.

    Attributes:
        sender: The number of the GPU that has the data.
        receiver: The number of the GPU that gets them.
        is_direct: Whether the driver says that the receiver reaches the sender's memory. Otherwise
            copies go by the host.
        arrives: Whether a pattern arrived as it was sent.
        latency_ns: The time of a copy of 4 KiB behind another.
        bytes_per_ns: By size in bytes, bytes per nanosecond of copies one behind another.
        both_ways: The same in each direction, while both are under way.
        among_all: The same of 256 MiB, while each GPU sends to its next one; 0 for other pairs.
        by_kernel: Bytes per nanosecond of 256 MiB that processors of the sender write; 0 without
            Triton or the C compiler that it calls, and where copies go by the host.
        copy_slows: The time of the sender's matrix products beside copies to the receiver, by their
            time alone.
    """

    sender: int
    receiver: int
    is_direct: bool
    arrives: bool
    latency_ns: float
    bytes_per_ns: Mapping[int, float]
    both_ways: Mapping[int, float]
    among_all: float
    by_kernel: float
    copy_slows: float


def links() -> tuple[MeasuredLink, ...]:
    """Every ordered pair of GPUs, measured. Needs 1 GiB on each GPU."""
    count = torch.cuda.device_count()
    largest = timed.LINK_SIZES[-1]
    places = [timed.room(number, largest) for number in range(count)]
    into = [timed.room(number, largest) for number in range(count)]
    ring = [(sender, (sender + 1) % count) for sender in range(count)]
    among_all: Mapping[tuple[int, int], float] = {}
    if count > 2:
        among_all = dict(zip(ring, _at_once(ring, places, into, largest), strict=True))
    return tuple(
        _link(sender, receiver, places, into, among_all)
        for sender in range(count)
        for receiver in range(count)
        if sender != receiver
    )


def _link(
    sender: int,
    receiver: int,
    places: Sequence[Tensor],
    into: Sequence[Tensor],
    among_all: Mapping[tuple[int, int], float],
) -> MeasuredLink:
    source, target = places[sender], into[receiver]
    rates = {size: timed.rate(sender, target, source, size) for size in timed.LINK_SIZES}
    ways = [(sender, receiver), (receiver, sender)]
    both = {size: _at_once(ways, places, into, size)[0] for size in timed.LINK_SIZES}
    smallest, *_, largest = timed.LINK_SIZES
    is_direct = _C.cuda_can_access_peer(receiver, sender)
    return MeasuredLink(
        sender,
        receiver,
        is_direct,
        _arrives(source, target, sender),
        smallest / rates[smallest],
        rates,
        both,
        among_all.get((sender, receiver), 0.0),
        _by_kernel(sender, target, source) if is_direct and _can_compile() else 0.0,
        timed.slows(sender, timed.copies(target, source, timed.copies_of(largest))),
    )


def _arrives(source: Tensor, target: Tensor, sender: int) -> bool:
    """Whether bytes that repeat with no power of two are the same at the other end."""
    sent = pattern_of(sender)
    landed = target[: len(sent)].zero_()
    _copied(landed, source[: len(sent)].copy_(sent))
    return torch.equal(landed.cpu(), sent)


def _copied(into: Tensor, source: Tensor) -> None:
    """A copy; tests put one that goes wrong in its place."""
    into.copy_(source)


def _can_compile() -> bool:
    """Whether Triton is there, and the C compiler that it calls when it launches a kernel."""
    compiler = os.environ.get("CC") or which("gcc") or which("clang")
    return find_spec("triton") is not None and compiler is not None


def _by_kernel(sender: int, into: Tensor, source: Tensor) -> float:
    """Bytes per nanosecond that the sender's processors write into another GPU's memory.

    The copies before have given the sender access to that memory.
    """
    from .kernel_copy import kernel_copy  # noqa: PLC0415 - needs Triton

    count = timed.copies_of(source.numel())

    def issue() -> None:
        for _ in range(count):
            kernel_copy(into, source)

    return count * source.numel() / timed.behind(sender, timed.copies(into, source, 1), issue)


def _at_once(
    pairs: Sequence[tuple[int, int]], places: Sequence[Tensor], into: Sequence[Tensor], size: int
) -> list[float]:
    """Bytes per nanosecond of each pair of GPUs, while all of them copy so many bytes at a time."""
    count = timed.copies_of(size)
    work = [
        (a, timed.nothing, timed.copies(into[b][:size], places[a][:size], count)) for a, b in pairs
    ]
    return [count * size / ns for ns in timed.at_once(work)]
