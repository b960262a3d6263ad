"""GPUs as torch lists them, and the bandwidth and latency of copies between them and the host.

A time is that between two events on a GPU, whose stream has work ahead of the first one for as long
as the host issues the copies between them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from shutil import which
from statistics import median

import torch
from torch import Tensor

from .. import _C
from ..runtime.gpu.peers import pattern_of

# From the latency of a copy to the bandwidth of its link.
LINK_SIZES = tuple(2**power for power in range(12, 29, 4))


_BYTES_OF_A_ROUND = 2**30
_COPIES = 4, 64
_ROUNDS = 3
_WIDTH = 4096
_PRODUCTS = 16
_NS = 1e6

# Issues some work on the current stream.
Issue = Callable[[], object]


@dataclass(frozen=True)
class MeasuredGpu:
    """One GPU.

    Attributes:
        name: As the driver calls it.
        memory_bytes: All of its memory.
        num_processors: Its streaming multiprocessors.
        capability: Its compute capability, such as (9, 0).
        from_host: By size in bytes, bytes per nanosecond of copies from pinned memory of the host.
        to_host: The same of copies to pinned memory.
        from_pageable: The same of copies of 256 MiB from memory that is not pinned.
        copy_slows: The time of matrix products beside copies from the host, by their time alone.
        memory_bytes_per_ns: Bytes that a copy within its memory reads and writes per nanosecond.
        flops_per_ns: Operations per nanosecond of products of large matrices in bfloat16; in
            float16 below compute capability 8, which has no units for bfloat16.
    """

    name: str
    memory_bytes: int
    num_processors: int
    capability: tuple[int, int]
    from_host: Mapping[int, float]
    to_host: Mapping[int, float]
    from_pageable: float
    copy_slows: float
    memory_bytes_per_ns: float
    flops_per_ns: float


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
        both_ways: The same of 256 MiB in each direction, while both are under way.
        among_all: The same, while each GPU sends to its next one; 0 for other pairs.
        by_kernel: Bytes per nanosecond of 256 MiB that processors of the sender write; 0 without
            Triton or the C compiler that it calls, and where copies go by the host.
    """

    sender: int
    receiver: int
    is_direct: bool
    arrives: bool
    latency_ns: float
    bytes_per_ns: Mapping[int, float]
    both_ways: float
    among_all: float
    by_kernel: float


def gpus() -> tuple[MeasuredGpu, ...]:
    """Every GPU that torch sees, measured with its host. Needs 512 MiB on each GPU."""
    return tuple(_gpu(number) for number in range(torch.cuda.device_count()))


def links() -> tuple[MeasuredLink, ...]:
    """Every ordered pair of GPUs, measured. Needs 1 GiB on each GPU."""
    count = torch.cuda.device_count()
    places = [_bytes(number, LINK_SIZES[-1]) for number in range(count)]
    into = [_bytes(number, LINK_SIZES[-1]) for number in range(count)]
    ring = [(sender, (sender + 1) % count) for sender in range(count)]
    among_all = dict(zip(ring, _at_once(ring, places, into), strict=True)) if count > 2 else {}
    return tuple(
        _link(sender, receiver, places, into, among_all)
        for sender in range(count)
        for receiver in range(count)
        if sender != receiver
    )


def uuids() -> list[str]:
    """By GPU, its name for NVIDIA's tools."""
    count = torch.cuda.device_count()
    return [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(count)]


def _gpu(number: int) -> MeasuredGpu:
    facts = torch.cuda.get_device_properties(number)
    here = _bytes(number, LINK_SIZES[-1])
    pinned = torch.empty(LINK_SIZES[-1], dtype=torch.uint8, device="cpu", pin_memory=True)
    pageable = torch.empty(LINK_SIZES[-1], dtype=torch.uint8)
    half = LINK_SIZES[-1] // 2
    return MeasuredGpu(
        facts.name,
        facts.total_memory,
        facts.multi_processor_count,
        (facts.major, facts.minor),
        {size: _rate(number, here, pinned, size) for size in LINK_SIZES},
        {size: _rate(number, pinned, here, size) for size in LINK_SIZES},
        _rate(number, here, pageable, LINK_SIZES[-1]),
        _copy_slows(number, here, pinned),
        # Each byte is read and written.
        2 * _rate(number, here[half:], here[:half], half),
        _flops_per_ns(number, torch.bfloat16 if facts.major >= 8 else torch.float16),
    )


def _link(
    sender: int,
    receiver: int,
    places: Sequence[Tensor],
    into: Sequence[Tensor],
    among_all: Mapping[tuple[int, int], float],
) -> MeasuredLink:
    source, target = places[sender], into[receiver]
    rates = {size: _rate(sender, target, source, size) for size in LINK_SIZES}
    both = _at_once([(sender, receiver), (receiver, sender)], places, into)
    smallest = LINK_SIZES[0]
    is_direct = _C.cuda_can_access_peer(receiver, sender)
    return MeasuredLink(
        sender,
        receiver,
        is_direct,
        _arrives(source, target, sender),
        smallest / rates[smallest],
        rates,
        both[0],
        among_all.get((sender, receiver), 0.0),
        _by_kernel(sender, target, source) if is_direct and _can_compile() else 0.0,
    )


def _bytes(gpu: int, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=f"cuda:{gpu}")


def _arrives(source: Tensor, target: Tensor, sender: int) -> bool:
    """Whether bytes that repeat with no power of two are the same at the other end."""
    sent = pattern_of(sender)
    landed = target[: len(sent)].zero_()
    _copied(landed, source[: len(sent)].copy_(sent))
    return torch.equal(landed.cpu(), sent)


def _copied(into: Tensor, source: Tensor) -> None:
    """A copy; tests put one that goes wrong in its place."""
    into.copy_(source)


def _rate(gpu: int, into: Tensor, source: Tensor, num_bytes: int) -> float:
    """Bytes per nanosecond of copies that a GPU's stream makes one behind another; a median."""
    count = _copies_of(num_bytes)
    copies = _copies(into[:num_bytes], source[:num_bytes], count)
    # A large copy ahead of them lasts for as long as the host issues them.
    return count * num_bytes / _behind(gpu, _copies(into, source, 1), copies)


def _can_compile() -> bool:
    """Whether Triton is there, and the C compiler that it calls when it launches a kernel."""
    compiler = os.environ.get("CC") or which("gcc") or which("clang")
    return find_spec("triton") is not None and compiler is not None


def _by_kernel(sender: int, into: Tensor, source: Tensor) -> float:
    """Bytes per nanosecond that the sender's processors write into another GPU's memory.

    The copies before have given the sender access to that memory.
    """
    from .kernel_copy import kernel_copy  # noqa: PLC0415 - needs Triton

    count = _copies_of(source.numel())

    def issue() -> None:
        for _ in range(count):
            kernel_copy(into, source)

    return count * source.numel() / _behind(sender, _copies(into, source, 1), issue)


def _behind(gpu: int, ahead: Issue, issue: Issue) -> float:
    """The time of some work behind other work of a GPU's stream, in nanoseconds; a median."""
    times = [_times([(gpu, ahead, issue)])[0] for _ in range(_ROUNDS + 1)]
    # The first round may enable access, bring memory to its place, or compile.
    return median(times[1:])


def _at_once(
    pairs: Sequence[tuple[int, int]], places: Sequence[Tensor], into: Sequence[Tensor]
) -> list[float]:
    """Bytes per nanosecond of each pair of GPUs, while all of them copy."""
    count = _copies_of(LINK_SIZES[-1])
    work = [(a, _nothing, _copies(into[b], places[a], count)) for a, b in pairs]
    rounds = [_times(work) for _ in range(_ROUNDS + 1)]
    return [count * LINK_SIZES[-1] / median(times) for times in zip(*rounds[1:], strict=True)]


def _flops_per_ns(gpu: int, dtype: torch.dtype) -> float:
    """Operations per nanosecond of matrix products, behind others of their kind."""
    products = _products(gpu, dtype)
    return _PRODUCTS * 2 * _WIDTH**3 / _behind(gpu, products, products)


def _products(gpu: int, dtype: torch.dtype) -> Issue:
    """Products of matrices of random numbers: with zeros, a GPU has more power for its clock."""
    matrix = torch.randn(_WIDTH, _WIDTH, device=f"cuda:{gpu}").to(dtype)

    def issue() -> None:
        for _ in range(_PRODUCTS):
            torch.mm(matrix, matrix)

    return issue


def _copy_slows(gpu: int, here: Tensor, pinned: Tensor) -> float:
    """The time of matrix products beside copies from the host, by their time alone."""
    products = _products(gpu, torch.float16)
    copies = gpu, _nothing, _copies(here, pinned, _copies_of(LINK_SIZES[-1]))
    measured = gpu, products, products
    alone = [_times([measured])[0] for _ in range(_ROUNDS + 1)]
    beside = [_times([copies, measured])[1] for _ in range(_ROUNDS + 1)]
    return median(beside[1:]) / median(alone[1:])


def _nothing() -> None:
    """Issues nothing."""


def _copies_of(num_bytes: int) -> int:
    fewest, most = _COPIES
    return max(fewest, min(most, _BYTES_OF_A_ROUND // num_bytes))


def _copies(into: Tensor, source: Tensor, count: int) -> Issue:
    def issue() -> None:
        for _ in range(count):
            into.copy_(source, non_blocking=True)

    return issue


def _times(work: Sequence[tuple[int, Issue, Issue]]) -> list[float]:
    """The times, in nanoseconds, of works that run at once.

    Args:
        work: a GPU, which gets a stream for it; what goes ahead of the measured part; that part.
    """
    for gpu in range(torch.cuda.device_count()):
        torch.cuda.synchronize(gpu)
    marks = []
    for gpu, ahead, issue in work:
        stream = torch.cuda.Stream(gpu)
        start, end = (torch.Event(f"cuda:{gpu}", enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            ahead()
            start.record(stream)
            issue()
            end.record(stream)
        marks.append((start, end))
    for _, end in marks:
        end.synchronize()
    return [start.elapsed_time(end) * _NS for start, end in marks]
