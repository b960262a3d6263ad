"""All the ways to run a model's steps that a search looks at."""

from __future__ import annotations

from collections.abc import Iterator

from ..partition.bottleneck import balanced_ends, spans_of
from ..plan import Plan
from ..plan.shares import Shares
from ..search import search
from ..search.catalogue import published
from .measurements import Measurements


def shares_of(num_devices: int, rows: int, *, replicated: bool) -> list[Shares]:
    """Numbers of microbatches and of replicas.

    Args:
        num_devices: of all replicas.
        rows: of a batch. Microbatches are its divisors and powers of two, so that they differ by
            one row at most.
        replicated: whether the model can have replicas.
    """
    powers = {1 << power for power in range(rows.bit_length())}
    divisors = {count for count in range(1, rows + 1) if rows % count == 0}
    replicas = [n for n in range(1, num_devices + 1) if num_devices % n == 0] if replicated else [1]
    return [
        Shares(num_devices, count, n)
        for n in replicas
        for count in sorted(powers | divisors)
        if count >= n
    ]


def plans_of(shares: Shares, num_units: int) -> Iterator[tuple[str, Plan]]:
    """The catalogue's plans of one replica, with every option, by name."""
    yield from published(
        shares.devices_of_one, microbatches_of_one(shares), max_chunks_of(shares, num_units)
    ).items()


def microbatches_of_one(shares: Shares) -> int:
    """The microbatches of a replica that has the most."""
    count = shares.microbatches_of_one
    assert count is not None
    return count


def max_chunks_of(shares: Shares, num_units: int) -> int:
    """Most stages of a device; 0 where the units are too few for the devices."""
    return min(search.MAX_CHUNKS, num_units // shares.devices_of_one)


def balanced_spans(measured: Measurements, num_stages: int, rows: float) -> tuple[range, ...]:
    """The cut whose slowest stage takes the least time."""
    pairs = zip(measured.of_units("F", rows), measured.of_units("B", rows), strict=True)
    # Whole numbers, so that the cut is exact; not 0, so that stages of cheap units spread evenly.
    return spans_of(balanced_ends([max(round(sum(pair)), 1) for pair in pairs], num_stages))
