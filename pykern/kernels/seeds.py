"""Seeds of random operations: one 64-bit seed for each call.

Random numbers are a function of the seed and of their place (counter-based), so the seed alone is
enough to repeat them.
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
    """A seed: a number, or the place of that number in the memory of a GPU.

    Attributes:
        value: the number, 0 <= value < 2**63; 0 for a seed in memory.
        place: int64 tensor of one element that holds the number when a kernel runs.
    """

    value: int
    place: Tensor | None


class _SeedsOfThread(threading.local):
    # The provided seeds, if any, and the position of the next one.
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
        raise RuntimeError(
            "random operations must be at most as many as the seeds provided for them, got more. "
            "Provide more seeds"
        )
    _local.position += 1
    return Seed(0, _local.places[_local.position - 1 : _local.position])


def is_drawing() -> bool:
    """Whether the random number that this thread is drawing is a seed."""
    return _local.is_drawing


def provided(places: Tensor) -> AbstractContextManager[object]:
    """A context in which calls of this thread read their seeds from memory.

    The memory may change: a CUDA graph that is captured in this context draws other numbers in each
    replay.

    Args:
        places: int64 tensor of one dimension; the first call reads its first element, and so on.
    """
    before = _local.places, _local.position
    return _C.Within(partial(_read, places, 0), lambda _: _read(*before))


def are_provided() -> bool:
    """Whether calls of this thread read their seeds from memory."""
    return _local.places is not None


def position() -> int:
    """The position of the next provided seed."""
    return _local.position


def again_from(position: int) -> AbstractContextManager[object]:
    """A context in which calls read the provided seeds again, from a position on."""
    places, before = _local.places, _local.position
    return _C.Within(partial(_read, places, position), lambda _: _read(places, before))


def _read(places: Tensor | None, position: int) -> None:
    _local.places, _local.position = places, position
