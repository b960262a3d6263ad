"""Where the random numbers of an operation begin: one seed of 64 bits for each call.

The numbers themselves are a function of the seed and of their place (counter-based), so nothing but
the seed is needed to have them again.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _C


class Seed(NamedTuple):
    """A number, or where it is in the memory of a GPU.

    Attributes:
        value: the number, 0 <= value < 2**63; 0 where it is in memory.
        place: int64 tensor of one element that holds the number when a kernel runs.
    """

    value: int
    place: Tensor | None


class _SeedsOfThread(threading.local):
    # Where seeds are provided, and which is next.
    places: Tensor | None = None
    position = 0
    is_drawing = False


_local = _SeedsOfThread()


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


def provided(places: Tensor) -> AbstractContextManager[object]:
    """A context, within which calls of this thread read their seeds from memory.

    There they may change: a CUDA graph that is captured so draws other numbers in each replay.

    Args:
        places: int64 tensor of one dimension; the first call reads its first element, and so on.
    """
    before = _local.places, _local.position
    return _C.Within(partial(_read, places, 0), lambda _: _read(*before))


def are_provided() -> bool:
    """Whether calls of this thread read their seeds from memory."""
    return _local.places is not None


def position() -> int:
    """Which of the seeds that are provided is next."""
    return _local.position


def again_from(position: int) -> AbstractContextManager[object]:
    """A context, within which calls read once more the seeds that were read from there on."""
    places, before = _local.places, _local.position
    return _C.Within(partial(_read, places, position), lambda _: _read(places, before))


def _read(places: Tensor | None, position: int) -> None:
    _local.places, _local.position = places, position
