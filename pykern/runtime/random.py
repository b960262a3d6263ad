"""Random numbers of concurrent stages, reproducible whatever the threads do.

torch has one default generator on the CPU, and stages that run at the same time would draw from it
in the order in which they happen to arrive. So every forward action draws from a state of its own,
keyed by (step, stage, microbatch); the key of the step is one number drawn from the caller's
default generator by the first action that needs it. The plain model draws the same numbers when
`torch.manual_seed(action_seed(step_seed, stage, microbatch))` precedes each stage of each
microbatch.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..plan import Action, Kind

# Held while the default generator lends its place to an action's state.
_default_generator = threading.RLock()

_NO_MODE = nullcontext()

_MASK = (1 << 64) - 1


def action_seed(step_seed: int, stage: int, microbatch: int) -> int:
    """Seed of a forward action: 64 bits, mixed by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    mixed = step_seed & _MASK
    for value in (stage, microbatch):
        mixed = (mixed + 0x9E3779B97F4A7C15 * (value + 1)) & _MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        mixed ^= mixed >> 31
    return mixed


class StepSeed:
    """The random number of one step, drawn from torch's default generator when first asked for.

    A model that draws nothing thus leaves the caller's generator alone.
    """

    def __init__(self) -> None:
        self._value: int | None = None

    def value(self) -> int:
        """The number; the same for all who ask in one step."""
        with _default_generator:
            if self._value is None:
                draw = torch.empty((), dtype=torch.int64, device="cpu").random_()
                self._value = int(draw.item())
            return self._value


class Draws:
    """Whether the forward actions of a stage draw random numbers, and which.

    `possible` is true until an action has been watched and drew nothing, so that a stage without
    dropout pays for watching once; each kind of backward action is watched in the same way.
    Changing the stage, as between train and eval mode or in what it trains, asks again.
    """

    def __init__(self, stage: int) -> None:
        self.possible = True
        self._stage = stage
        self._drew = False
        self._mode: object = None
        self._safe: set[tuple[Kind, int]] = set()

    def begin(self, seed: StepSeed, mode: object) -> None:
        """Starts a step. `mode` is any value that changes when other layers may draw."""
        self._seed = seed
        if mode != self._mode:
            self._mode = mode
            self.possible = True
            self._drew = False
            self._safe.clear()

    def watched(self, *, drew: bool) -> None:
        """A forward action has ended. What drew once may draw again, if not every time."""
        self._drew = self._drew or drew
        self.possible = self._drew

    def forward(self, microbatch: int) -> _OwnState:
        """The mode to run a forward action in."""
        return _OwnState(self, self._seed, self._stage, microbatch)

    def backward(
        self, kind: Kind, microbatch: int, num_inputs: int = 0
    ) -> AbstractContextManager[object]:
        """The mode to run a backward action in: none, once one has been seen to draw nothing.

        One that leads to more inputs, because an earlier stage has come to train, is another.
        """
        if not self.possible or (kind, num_inputs) in self._safe:
            return _NO_MODE
        return _RefuseInBackward(self._safe, Action(kind, self._stage, microbatch), num_inputs)


def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch loads its compiler in the first action, on a worker: a second, and an interrupt
        # meanwhile would leave it half imported.
        return False


class _OwnState(_Mode):
    """Gives every random operation the generator state of this action."""

    def __init__(self, draws: Draws, seed: StepSeed, stage: int, microbatch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
        self._seed = seed
        self._key = (stage, microbatch)
        self._state: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_random(func):
            return func(*args, **(kwargs or {}))
        default = torch.default_generator
        with _default_generator:
            if self._state is None:
                seed = action_seed(self._seed.value(), *self._key)
                self._state = torch.Generator().manual_seed(seed).get_state()
            callers = default.get_state()
            default.set_state(self._state)
            try:
                return func(*args, **(kwargs or {}))
            finally:
                self._state = default.get_state()
                default.set_state(callers)

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if exception[0] is None:
            self._draws.watched(drew=self._state is not None)


class _RefuseInBackward(_Mode):
    """Finds recomputation that would draw other numbers than the forward it repeats."""

    def __init__(self, safe: set[tuple[Kind, int]], action: Action, num_inputs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._safe = safe
        self._action = action
        self._num_inputs = num_inputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_random(func):
            raise RuntimeError(
                f"{func} draws random numbers in a backward ({self._action}): activation "
                "checkpointing of a layer with dropout cannot repeat the numbers of its forward "
                "here; checkpoint without dropout, or use dropout without checkpointing"
            )
        return func(*args, **(kwargs or {}))

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if exception[0] is None:
            self._safe.add((self._action.kind, self._num_inputs))
