"""Random numbers of stages with compiled layers, whose operations cannot be watched one by one.

Compiled code may draw in its kernels, so it cannot use the interceptors of `.eager`: during the
whole action, the default generators are in the action's state. Meanwhile other threads that draw
must wait, so such actions take turns as long as a stage may draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ... import _C
from ...modes import set_states

# The states of some generators at the begin of a whole action.
States = dict[torch.Generator, Tensor]


class Whole:
    """An action with its own states of default generators.

    Args:
        generators: the generators.
        begin: sets the states of the generators; called with the lock.
        drew: called with whether the action drew random numbers, unless the action raised.
    """

    def __init__(
        self,
        generators: Sequence[torch.Generator],
        begin: Callable[[], None],
        drew: Callable[[bool], None],
    ) -> None:
        self._generators = generators
        self._begin = begin
        self._drew = drew
        self._callers: States = {}
        self._first: States = {}
        # Whether the action drew numbers, and whether `drew` was called: `_leave` may run twice.
        self._any: bool | None = None
        self._told = False

    def held(self, lock: Any) -> AbstractContextManager[Whole]:
        """A context that holds the lock; at its end the generators' states are restored."""
        return _C.Within(self._enter, self._leave, lock)

    def note(self) -> States:
        """The current states."""
        return WholeStates((one, one.get_state()) for one in self._generators)

    def _enter(self) -> Whole:
        self._first = self._callers = self.note()
        self._begin()
        self._first = self.note()
        return self

    def _leave(self, error: BaseException | None) -> None:
        if self._any is None:
            states = self._first.items()
            self._any = any(not torch.equal(one.get_state(), was) for one, was in states)
        set_states(self._callers)
        if error is None and not self._told:
            self._told = True
            self._drew(self._any)


class WholeStates(States):
    """States for a whole action, as a type of its own: see `pykern.runtime.random.draws.repeat`."""
