"""Where the random numbers of an operation begin: one seed of 64 bits for each call.

The numbers themselves are a function of the seed and of their place (counter-based), so nothing but
the seed is needed to have them again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor


class Seed(NamedTuple):
    """A number, or where it is in the memory of a GPU.

    Attributes:
        value: the number, 0 <= value < 2**63; 0 where it is in memory.
        place: int64 tensor of one element that holds the number when a kernel runs.
    """

    value: int
    place: Tensor | None


class _Local(threading.local):
    places: Iterator[Tensor] | None = None
    is_drawing = False


_local = _Local()


def draw() -> Seed:
    """The seed of the next call: from torch's default generator of the CPU, or as provided."""
    if _local.places is None:
        _local.is_drawing = True
        try:
            return Seed(int(torch.empty((), dtype=torch.int64, device="cpu").random_()), None)
        finally:
            _local.is_drawing = False
    place = next(_local.places, None)
    if place is None:
        raise RuntimeError("more random operations are called than seeds were provided for")
    return Seed(0, place)


def is_drawing() -> bool:
    """Whether the random number that this thread is drawing is a seed."""
    return _local.is_drawing


@contextmanager
def provided(places: Tensor) -> Iterator[None]:
    """Within it, calls of this thread read their seeds from memory, where they may change.

    A CUDA graph that is captured so draws other numbers in each replay.

    Args:
        places: int64 tensor of one dimension; the first call reads its first element, and so on.
    """
    before, _local.places = _local.places, iter([places[i : i + 1] for i in range(len(places))])
    try:
        yield
    finally:
        _local.places = before
