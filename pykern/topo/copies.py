"""The bandwidth of copies in memory, by size, and the rate of products: of one thread."""

from __future__ import annotations

import time
from statistics import median

import torch

from ..modes import torch_threads

SIZES = tuple(2**power for power in range(12, 29, 2))

_ROUNDS = 5
_WIDTH = 512
_BYTES_OF_A_ROUND = 2**24


def copy_bytes_per_ns(num_bytes: int) -> float:
    """Bytes copied by `Tensor.copy_` per nanosecond, a median; the same number in GB/s."""
    return num_bytes / median(copies_ns(num_bytes, _ROUNDS))


def flops_per_ns() -> float:
    """Operations of float32 matrix products per nanosecond on one thread, a median."""
    matrix = torch.randn(_WIDTH, _WIDTH)
    times = []
    with torch_threads(1):
        for _ in range(_ROUNDS):
            start = time.perf_counter_ns()
            torch.mm(matrix, matrix)
            times.append(time.perf_counter_ns() - start)
    return 2 * _WIDTH**3 / median(times)


def copies_ns(num_bytes: int, rounds: int) -> list[float]:
    """The time of a copy in each round, the mean of as many copies as a round has."""
    source = torch.ones(num_bytes, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    copies = max(1, _BYTES_OF_A_ROUND // num_bytes)
    with torch_threads(1):
        return [_copies_ns(source, target, copies) / copies for _ in range(rounds)]


def _copies_ns(source: torch.Tensor, target: torch.Tensor, copies: int) -> int:
    start = time.perf_counter_ns()
    for _ in range(copies):
        target.copy_(source)
    return time.perf_counter_ns() - start
