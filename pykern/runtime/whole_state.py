"""Random numbers of stages with compiled layers, whose operations cannot be looked at one by one.

torch runs no compiled code below a dispatch mode, so these take the place of the modes of
`.random`: for the whole action the default generators are in the action's state. Meanwhile whoever
else draws has to wait, so such actions take turns as long as a stage may draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# The states of some generators, to begin a whole action from.
States = dict[torch.Generator, Tensor]


class Whole:
    """Within it, default generators have states of an action; behind it, those of before.

    Args:
        lock: held meanwhile.
        generators: which.
        begin: sets their states; called with the lock.
        drew: called with whether any was drawn from, unless something was raised.
    """

    def __init__(
        self,
        lock: Any,
        generators: Sequence[torch.Generator],
        begin: Callable[[], None],
        drew: Callable[[bool], None],
    ) -> None:
        self._lock = lock
        self._generators = generators
        self._begin = begin
        self._drew = drew

    def note(self) -> States:
        """The states of now."""
        return WholeStates((one, one.get_state()) for one in self._generators)

    def __enter__(self) -> Whole:
        self._lock.acquire()
        self._callers = self.note()
        try:
            self._begin()
        except BaseException:
            self._lock.release()
            raise
        self._first = self.note()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            drew = any(not torch.equal(one.get_state(), was) for one, was in self._first.items())
            set_states(self._callers)
            if kind is None:
                self._drew(drew)
        finally:
            self._lock.release()


class WholeStates(States):
    """States for a whole action, as a type of its own: see `pykern.runtime.random.repeat`."""


def set_states(states: States) -> None:
    """Has generators draw from these states on."""
    for generator, state in states.items():
        generator.set_state(state)
