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
    # Where seeds are provided, and which is next.
    places: Tensor | None = None
    position = 0
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
    if _local.position == len(_local.places):
        raise RuntimeError("more random operations are called than seeds were provided for")
    _local.position += 1
    return Seed(0, _local.places[_local.position - 1 : _local.position])


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
    before = _local.places, _local.position
    _local.places, _local.position = places, 0
    try:
        yield
    finally:
        _local.places, _local.position = before


def position() -> int:
    """Which of the seeds that are provided is next."""
    return _local.position


@contextmanager
def again_from(position: int) -> Iterator[None]:
    """Within it, calls read once more the seeds that were read from there on."""
    before, _local.position = _local.position, position
    try:
        yield
    finally:
        _local.position = before
