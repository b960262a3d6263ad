"""Modes in which single operations draw random numbers from states of an action's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import _C
from ...kernels import seeds
from ...plan import Action, Kind
from ...torch_private import DispatchMode
from .seed import StepSeed, action_seed, default_generator, generators_lent

_CPU = torch.device("cpu")

# The states of some generators.
Begins = dict[torch.Generator, Tensor]


def _generator_of(args: Any, kwargs: Any) -> torch.Generator:
    """The default generator of the device on which an operation draws."""
    of_tensors = (value.device for value in args if isinstance(value, Tensor))
    return default_generator(kwargs.get("device") or next(of_tensors, _CPU))


@cache
def _is_random(func: Any) -> bool:
    """Whether the operation may draw. Attention on a GPU also has the tag without dropout."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _own_generator(args: Any, kwargs: Any) -> torch.Generator | None:
    """The generator that the operation is given."""
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, torch.Generator)), None)


class OwnState(DispatchMode):
    """Gives every random operation this action's state of the generator that it draws from.

    Args:
        ended: called where the action has not failed, with what it drew: `Draws.watched`.
        seed: of the step.
        stage: of the action.
        microbatch: of the action.
    """

    def __init__(
        self, ended: Callable[..., object], seed: StepSeed, stage: int, microbatch: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ended = ended
        self._seed = seed
        self._key = (stage, microbatch)
        self._states: Begins = {}
        self._noted: Begins = {}
        self._drew = False
        self._num_seeds = 0
        self._only_seeds = True

    def note(self) -> Begins:
        """From now on, the state in which each generator is first drawn from: see `repeat`."""
        self._noted = {}
        return self._noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        own = _own_generator(args, kwargs)
        with generators_lent:
            generator = _generator_of(args, kwargs)
            before = after = callers = generator.get_state()
            try:
                with _C.Undo(generator.set_state, callers):
                    before = after = self._begin(generator)
                    drawn = generator if own is None else own
                    if drawn not in self._noted:
                        self._noted[drawn] = drawn.get_state()
                    try:
                        return func(*args, **kwargs)
                    finally:
                        after = self._states[generator] = generator.get_state()
            finally:
                if own is not None or not torch.equal(before, after):
                    self._drew = True
                    self._num_seeds += seeds.is_drawing()
                    self._only_seeds = self._only_seeds and seeds.is_drawing()
                    self._seed.use()

    def _begin(self, generator: torch.Generator) -> Tensor:
        """Sets the generator to this action's state, which is returned."""
        state = self._states.get(generator)
        if state is not None:
            generator.set_state(state)
            return state
        generator.manual_seed(action_seed(self._seed.value(), *self._key))
        return generator.get_state()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if exception[0] is None:
            self._ended(drew=self._drew, num_seeds=self._num_seeds, only_seeds=self._only_seeds)


class Repeat(DispatchMode):
    """Has random operations draw what was drawn when these states were noted."""

    def __init__(self, begins: Begins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = dict(begins)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        with generators_lent:
            generator = _own_generator(args, kwargs) or _generator_of(args, kwargs)
            if generator not in self._states:
                raise RuntimeError(f"{func} draws from a generator that the forward left alone")
            with _C.Undo(generator.set_state, generator.get_state()):
                generator.set_state(self._states[generator])
                try:
                    return func(*args, **kwargs)
                finally:
                    self._states[generator] = generator.get_state()


class NoteOwn(DispatchMode):
    """Notes in which state generators are first drawn from that operations are given.

    Attributes:
        begins: these states.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.begins: Begins = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = _own_generator(args, kwargs) if _is_random(func) else None
        if own is not None and own not in self.begins:
            self.begins[own] = own.get_state()
        return func(*args, **kwargs)


class RefuseInBackward(DispatchMode):
    """Finds recomputation that would draw other numbers than the forward it repeats."""

    def __init__(self, safe: set[tuple[Kind, object]], action: Action, form: object) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._safe = safe
        self._action = action
        self._form = form

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        if _own_generator(args, kwargs) is not None:
            raise refusal(func, self._action)
        with generators_lent:
            generator = _generator_of(args, kwargs)
            before = generator.get_state()
            result = func(*args, **kwargs)
            if not torch.equal(before, generator.get_state()):
                generator.set_state(before)
                raise refusal(func, self._action)
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if exception[0] is None:
            self._safe.add((self._action.kind, self._form))


def refusal(what: object, action: Action) -> RuntimeError:
    """The error for an operation that draws in a backward."""
    return RuntimeError(
        f"{what} draws random numbers in a backward ({action}): activation checkpointing of a "
        "layer with dropout cannot repeat the numbers of its forward here; checkpoint without "
        "dropout, or use dropout without checkpointing"
    )
