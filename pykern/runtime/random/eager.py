"""Random numbers of concurrent stages, reproducible whatever the threads do.

torch has one default generator for the CPU and one for each GPU, and stages that run at the same
time would draw from it in the order in which they happen to arrive. So every forward action draws
from states of its own, keyed by (step, stage, microbatch); the key of the step is one number drawn
from the caller's default generator on the CPU by the first action that needs it. The plain model
draws the same numbers when `torch.manual_seed(action_seed(step_seed, stage, microbatch))`, which
seeds the generators of all devices, precedes each stage of each microbatch.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import _C
from ...kernels import seeds
from ...modes import set_states
from ...plan import Action, Kind
from ...torch_private import TorchDispatchMode
from .compiled import Whole, WholeStates

# Held while a default generator lends its place to an action's state.
_default_generators = threading.RLock()
# Another thread may hold it where this process is forked.
os.register_at_fork(after_in_child=_default_generators._at_fork_reinit)  # type: ignore[attr-defined]

_NO_MODE = nullcontext()
_CPU = torch.device("cpu")

_MASK = (1 << 64) - 1

# The states of some generators.
Begins = dict[torch.Generator, Tensor]


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
    """The next random number of torch's default generator, from which it is taken when used.

    A model that draws nothing thus leaves the caller's generator alone.
    """

    def __init__(self) -> None:
        self._value: int | None = None
        # The caller's generator behind the number, until the number is used.
        self._behind: Tensor | None = None

    def of(self, microbatch: int) -> tuple[StepSeed, int]:
        """The seed of a microbatch's step, and which of its microbatches it is."""
        return self, microbatch

    def value(self) -> int:
        """The number; the same for all who ask in one step."""
        with _default_generators:
            if self._value is None:
                generator = torch.default_generator
                with _C.Undo(generator.set_state, generator.get_state()):
                    draw = torch.empty((), dtype=torch.int64, device="cpu").random_()
                    self._behind = generator.get_state()
                    self._value = int(draw.item())
            return self._value

    def use(self) -> None:
        """Takes the number from the caller's generator, once however many use it."""
        with _default_generators:
            if self._behind is not None:
                torch.default_generator.set_state(self._behind)
                self._behind = None


class Draws:
    """Whether the forward actions of a stage draw random numbers, and which.

    `possible` is true until an action has been watched and drew nothing, so that a stage without
    dropout pays for watching once; each kind of backward action is watched in the same way.
    Changing the stage, as between train and eval mode or in what it trains, asks again.

    Attributes:
        possible: whether a forward may draw.
        num_seeds: the most seeds of kernels that a forward has drawn.
        only_seeds: whether no forward has drawn anything else.
        state: what the forward that is under way draws from, None where nothing is watched.
    """

    def __init__(self, stage: int) -> None:
        self.possible = True
        self.num_seeds = 0
        self.only_seeds = True
        self.state: OwnState | Whole | None = None
        self._stage = stage
        self._drew = False
        # Of a stage with compiled layers, the generators that they draw from; else empty.
        self._whole: Sequence[torch.Generator] = ()
        self._mode: object = None
        self._safe: set[tuple[Kind, object]] = set()

    def begin(self, seed: StepSeed, mode: object, compiled_for: torch.device | None = None) -> None:
        """Starts a step.

        Args:
            seed: of the step.
            mode: any value that changes when other layers may draw.
            compiled_for: where the stage is, if it has compiled layers.
        """
        self._seed = seed
        if compiled_for is None:
            self._whole = ()
        else:
            devices = {_CPU, compiled_for}
            self._whole = [default_generator(device) for device in devices]
        if mode != self._mode:
            self.possible = True
            self._drew = False
            self.num_seeds, self.only_seeds = 0, True
            self._safe.clear()
            # Last, so that an interrupt has it begin again.
            self._mode = mode

    def watched(self, *, drew: bool, num_seeds: int, only_seeds: bool) -> None:
        """A forward action has ended. What drew once may draw again, if not every time."""
        self._drew = self._drew or drew
        self.possible = self._drew
        self.num_seeds = max(self.num_seeds, num_seeds)
        self.only_seeds = self.only_seeds and only_seeds

    def seeds_of(self, seed: StepSeed, microbatch: int, count: int) -> Tensor:
        """The first that a forward draws if it draws nothing but seeds: int64 [count]."""
        own = torch.Generator().manual_seed(action_seed(seed.value(), self._stage, microbatch))
        return torch.empty(count, dtype=torch.int64, device="cpu").random_(generator=own)

    def forward(self, microbatch: int) -> AbstractContextManager[OwnState | Whole | None]:
        """The mode to run a forward action in: none where it draws nothing.

        Nor where seeds are provided, in a capture: a GPU's generator refuses to tell its state.
        """
        if not self.possible or seeds.are_provided():
            return _NO_MODE
        seed, index = self._seed.of(microbatch)
        if self._whole:
            return self._whole_forward(seed, index)
        return OwnState(self, seed, self._stage, index)

    def backward(
        self, kind: Kind, microbatch: int, form: object = None
    ) -> AbstractContextManager[object]:
        """The mode to run a backward action in: none, once one has been seen to draw nothing.

        One of another form is another: of another part of the stage, or one that leads to more
        inputs, because an earlier stage has come to train.
        """
        if self.is_safe(kind, form) or seeds.are_provided():
            return _NO_MODE
        action = Action(kind, self._stage, microbatch)
        if self._whole:
            return self._whole_backward(action, form)
        return _RefuseInBackward(self._safe, action, form)

    def is_safe(self, kind: Kind, form: object) -> bool:
        """Whether such a backward action is known to draw nothing."""
        return not self.possible or (kind, form) in self._safe

    def _whole_forward(self, seed: StepSeed, index: int) -> AbstractContextManager[Whole]:
        number = action_seed(seed.value(), self._stage, index)

        def begin() -> None:
            for generator in self._whole:
                generator.manual_seed(number)

        def drew(any_drawn: bool) -> None:
            if any_drawn:
                seed.use()
            self.watched(drew=any_drawn, num_seeds=0, only_seeds=not any_drawn)

        return Whole(self._whole, begin, drew).held(_default_generators)

    def _whole_backward(self, action: Action, form: object) -> AbstractContextManager[Whole]:
        def drew(any_drawn: bool) -> None:
            if any_drawn:
                raise _refusal("a compiled layer", action)
            self._safe.add((action.kind, form))

        return Whole(self._whole, lambda: None, drew).held(_default_generators)


def repeat(begins: Begins) -> AbstractContextManager[object]:
    """The mode in which random operations draw what they drew from these states on."""
    if isinstance(begins, WholeStates):
        start = partial(set_states, begins)
        return Whole(list(begins), start, lambda _: None).held(_default_generators)
    return _Repeat(begins) if begins else _NO_MODE


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which random operations on a device draw."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _generator_of(args: Any, kwargs: Any) -> torch.Generator:
    """The default generator of the device on which an operation draws."""
    of_tensors = (value.device for value in args if isinstance(value, Tensor))
    return default_generator(kwargs.get("device") or next(of_tensors, _CPU))


def _is_random(func: Any) -> bool:
    """Whether the operation may draw. Attention on a GPU also has the tag without dropout."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _own_generator(args: Any, kwargs: Any) -> torch.Generator | None:
    """The generator that the operation is given."""
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, torch.Generator)), None)


class _Mode(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch loads its compiler in the first action, on a worker: a second, and an interrupt
        # meanwhile would leave it half imported.
        return False


class OwnState(_Mode):
    """Gives every random operation this action's state of the generator that it draws from."""

    def __init__(self, draws: Draws, seed: StepSeed, stage: int, microbatch: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws
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
        with _default_generators:
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
            self._draws.watched(
                drew=self._drew, num_seeds=self._num_seeds, only_seeds=self._only_seeds
            )


class _Repeat(_Mode):
    """Has random operations draw what was drawn when these states were noted."""

    def __init__(self, begins: Begins) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states = dict(begins)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        with _default_generators:
            generator = _own_generator(args, kwargs) or _generator_of(args, kwargs)
            if generator not in self._states:
                raise RuntimeError(f"{func} draws from a generator that the forward left alone")
            with _C.Undo(generator.set_state, generator.get_state()):
                generator.set_state(self._states[generator])
                try:
                    return func(*args, **kwargs)
                finally:
                    self._states[generator] = generator.get_state()


class NoteOwn(_Mode):
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


class _RefuseInBackward(_Mode):
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
            raise _refusal(func, self._action)
        with _default_generators:
            generator = _generator_of(args, kwargs)
            before = generator.get_state()
            result = func(*args, **kwargs)
            if not torch.equal(before, generator.get_state()):
                generator.set_state(before)
                raise _refusal(func, self._action)
        return result

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if exception[0] is None:
            self._safe.add((self._action.kind, self._form))


def _refusal(what: object, action: Action) -> RuntimeError:
    return RuntimeError(
        f"{what} draws random numbers in a backward ({action}): activation checkpointing of a "
        "layer with dropout cannot repeat the numbers of its forward here; checkpoint without "
        "dropout, or use dropout without checkpointing"
    )
