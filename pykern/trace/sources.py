"""Generators of random numbers of any kind: Python's, numpy's, torch's."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .state import described


@dataclass(frozen=True, slots=True)
class Source:
    """A generator of random numbers.

    Attributes:
        name: what a user calls it.
        get: gives its state.
        set: takes a state.
        is_torchs: whether operations of torch draw from it: these are recorded and draw again.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    is_torchs: bool = False

    def mark(self) -> Hashable:
        """Equals another only if the generator would draw the same."""
        state = self.get()
        return state if isinstance(state, tuple) else described(state, 3)


def everyones() -> list[Source]:
    """The generators of the process, but for torch's. Numpy need not be there."""
    found = [Source("Python's random", random.getstate, random.setstate)]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        get = partial(numpy.random.get_state, legacy=False)
        found.append(Source("numpy.random", get, numpy.random.set_state))
    return found


def source_of(name: str, value: Any) -> Source | None:
    """A generator that somebody keeps; None for anything else, and for one without a state."""
    if isinstance(value, torch.Generator):
        return Source(name, value.get_state, value.set_state, is_torchs=True)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return Source(name, value.getstate, value.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return Source(name, partial(value.get_state, legacy=False), value.set_state)
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return Source(name, lambda: bits.state, lambda state: setattr(bits, "state", state))
    return None
