"""Works of GPUs' streams, and their times.

A time is that between two events on a GPU, whose stream has work ahead of the first one for as long
as the host issues the work between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

# From the latency of a copy to the bandwidth of its link.
LINK_SIZES = tuple(2**power for power in range(12, 29, 4))
WIDTH = 4096
PRODUCTS = 16

_BYTES_OF_A_ROUND = 2**30
_COPIES = 4, 64
_ROUNDS = 3
_NS = 1e6

# Issues some work on the current stream.
Issue = Callable[[], object]
# A GPU, which gets a stream for it; what goes ahead of the measured part; that part.
TimedWork = tuple[int, Issue, Issue]


def room(gpu: int, count: int) -> Tensor:
    """So many bytes on a GPU."""
    return torch.zeros(count, dtype=torch.uint8, device=f"cuda:{gpu}")


def nothing() -> None:
    """Issues nothing."""


def copies(into: Tensor, source: Tensor, count: int) -> Issue:
    """So many copies."""

    def issue() -> None:
        for _ in range(count):
            into.copy_(source, non_blocking=True)

    return issue


def copies_of(num_bytes: int) -> int:
    """The number of copies of this size in a round."""
    fewest, most = _COPIES
    return max(fewest, min(most, _BYTES_OF_A_ROUND // num_bytes))


def products(gpu: int, dtype: torch.dtype) -> Issue:
    """Products of matrices of random numbers: with zeros, a GPU has more power for its clock."""
    matrix = torch.randn(WIDTH, WIDTH, device=f"cuda:{gpu}").to(dtype)

    def issue() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)

    return issue


def rate(gpu: int, into: Tensor, source: Tensor, num_bytes: int) -> float:
    """Bytes per nanosecond of copies that a GPU's stream makes one behind another; a median."""
    count = copies_of(num_bytes)
    measured = copies(into[:num_bytes], source[:num_bytes], count)
    # A large copy ahead of them lasts for as long as the host issues them.
    return count * num_bytes / behind(gpu, copies(into, source, 1), measured)


def behind(gpu: int, ahead: Issue, issue: Issue) -> float:
    """The time of some work behind other work of a GPU's stream, in nanoseconds; a median."""
    return at_once([(gpu, ahead, issue)])[0]


def slows(gpu: int, issue: Issue) -> float:
    """The time of matrix products beside other work of their GPU, by their time alone."""
    measured = products(gpu, torch.float16)
    of = gpu, measured, measured
    return at_once([(gpu, nothing, issue), of])[1] / at_once([of])[0]


def at_once(work: Sequence[TimedWork]) -> list[float]:
    """The times, in nanoseconds, of works that run at once; medians."""
    rounds = [_times(work) for _ in range(_ROUNDS + 1)]
    # The first round may enable access, bring memory to its place, or compile.
    return [median(times) for times in zip(*rounds[1:], strict=True)]


def _times(work: Sequence[TimedWork]) -> list[float]:
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
