"""Interceptors: single operations draw random numbers from the states of their action."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ... import _C
from ...kernels import seeds
from ...plan import Action
from ...torch_private import (
    Interceptor,
    Operation,
    interceptor,
    set_interceptor,
    takes_generator,
    watch_draws,
)
from .seed import StepSeed, default_generator, generators_lent, mixed

if TYPE_CHECKING:
    from .draws import Draws

_CPU = torch.device("cpu")


class Seeded(NamedTuple):
    """A generator of a stage, and the seed that it begins an action with."""

    generator: torch.Generator
    seed: int


# The states of some default generators. A seed takes a thousandth of the memory of a state.
Begins = Mapping[torch.Generator, Tensor | Seeded]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def know_operations() -> None:
    """Registers the operations that may draw; called before any of the interceptors here."""
    with generators_lent:
        watch_draws()


def _generator_of(args: Args, kwargs: Kwargs) -> torch.Generator:
    """The default generator of the device on which an operation draws."""
    of_tensors = (value.device for value in args if isinstance(value, Tensor))
    return default_generator(kwargs.get("device") or next(of_tensors, _CPU))


def _own_generator(args: Args, kwargs: Kwargs) -> torch.Generator | None:
    """The generator among the operation's arguments, if any."""
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, torch.Generator)), None)


class OwnState(Interceptor):
    """Gives every random operation the generator of this action.

    An operation that does not accept a generator, or runs on a GPU, uses the default generator,
    which has the action's state meanwhile.

    Args:
        draws: of the stage; gets the action's draws, unless the action fails.
        seed: of the step.
        microbatch: of the action.
    """

    _noted: dict[torch.Generator, Tensor | Seeded] | None = None
    # The last seed of a generator, and whether nothing has been noted since.
    _number = 0
    _is_fresh = False
    _drew = False
    _num_seeds = 0
    _only_seeds = True

    def __init__(self, draws: Draws, seed: StepSeed, microbatch: int) -> None:
        self._draws = draws
        self._seed = seed
        self._microbatch = microbatch
        # The stage's generators in this action, by the default generators in whose places they are.
        self._seeded: dict[torch.Generator, torch.Generator] = {}
        # Watching ends when the stage is known to draw more than kernel seeds.
        self._is_known = not draws.only_seeds
        # Then the operations that take this action's generator are given it, and nobody is asked.
        if self._is_known and seed.is_used and torch.default_generator in draws.generators:
            self.generator = self._own(torch.default_generator)
            self._is_fresh = True

    def begins(self) -> Begins:
        """The states for `repeat` of all draws of this action, none of which has come yet.

        Only while there is a `generator`. Others are noted at their first draw from now on.
        """
        if self._noted is None:
            assert self.generator is not None
            self._noted = {torch.default_generator: Seeded(self.generator, self._number)}
        return self._noted

    def note(self) -> Begins:
        """Notes from now on the state of each generator at its first draw: see `repeat`."""
        if self._is_fresh:
            self._is_fresh = False
            return self.begins()
        self.generator, self._noted = None, {}
        return self._noted

    def draw(self, func: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Calls the operation with a generator of this action, or lends it the state of one."""
        if not takes_generator(func, args, kwargs):
            return self._lend(func, args, kwargs)
        default = torch.default_generator
        kwargs["generator"] = own = self._seeded.get(default) or self._own(default)
        if self._noted is not None and default not in self._noted:
            self._noted[default] = own.get_state()
        if self._is_known and self._seed.is_used:
            return func.method(*args, **kwargs)
        before = own.get_state()
        try:
            return func.method(*args, **kwargs)
        finally:
            self._look(drew=not torch.equal(before, own.get_state()))

    def _lend(self, func: Operation, args: Args, kwargs: Kwargs) -> Any:
        given = _own_generator(args, kwargs)
        with generators_lent:
            generator = _generator_of(args, kwargs)
            own = self._own(generator)
            before = own.get_state()
            drawn, state = (generator, before) if given is None else (given, given.get_state())
            if self._noted is not None and drawn not in self._noted:
                self._noted[drawn] = state
            try:
                return _lent(generator, own, func, args, kwargs)
            finally:
                self._look(drew=given is not None or not torch.equal(before, own.get_state()))

    def _look(self, *, drew: bool) -> None:
        """Notes whether an operation has drawn."""
        if drew:
            self._drew = True
            self._num_seeds += seeds.is_drawing()
            self._only_seeds = self._only_seeds and seeds.is_drawing()
            self._seed.use()

    def _own(self, generator: torch.Generator) -> torch.Generator:
        """This action's generator in place of a default generator."""
        draws = self._draws
        own = draws.generators.get(generator)
        if own is None:
            own = draws.generators[generator] = torch.Generator(generator.device)
        if generator not in self._seeded:
            stage, seed = draws.stage, self._seed
            of_stage = seed.of_stages.get(stage) or seed.of_stage(stage)
            self._number = mixed(of_stage, self._microbatch)
            self._seeded[generator] = own.manual_seed(self._number)
        return own

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if not self._is_known and exception[0] is None:
            self._draws.watched(
                drew=self._drew, num_seeds=self._num_seeds, only_seeds=self._only_seeds
            )


class Repeat(Interceptor):
    """Makes random operations draw the same numbers as when these states were noted."""

    def __init__(self, begins: Begins) -> None:
        self._begins = begins
        self._generators: dict[torch.Generator, torch.Generator] = {}
        if torch.default_generator in begins:
            self.generator = self._own(torch.default_generator)

    def draw(self, func: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Calls the operation such that it repeats its draws."""
        with generators_lent:
            generator = _own_generator(args, kwargs) or _generator_of(args, kwargs)
            if generator not in self._begins:
                raise RuntimeError(
                    "layers must draw from the same generators when they are recomputed, got "
                    f"another in {func}. Leave out recompute for such layers"
                )
            return _lent(generator, self._own(generator), func, args, kwargs)

    def _own(self, generator: torch.Generator) -> torch.Generator:
        """A generator that repeats the draws of this generator."""
        own = self._generators.get(generator)
        if own is None:
            begin = self._begins[generator]
            if isinstance(begin, Seeded):
                own = begin.generator.manual_seed(begin.seed)
            else:
                own = torch.Generator(generator.device)
                own.set_state(begin)
            self._generators[generator] = own
        return own


def _lent(
    generator: torch.Generator, own: torch.Generator, func: Operation, args: Args, kwargs: Kwargs
) -> Any:
    """Calls an operation while a generator has the state of another, which then advances."""
    # The layer may belong to a pipeline within a layer of another one, whose interceptor would draw
    # in place of the generator.
    outer = interceptor() if _own_generator(args, kwargs) is None else None
    with _C.Undo(generator.set_state, generator.get_state()):
        generator.set_state(own.get_state())
        if outer is not None:
            set_interceptor(None)
        try:
            return func(*args, **kwargs)
        finally:
            if outer is not None:
                set_interceptor(outer)
            own.set_state(generator.get_state())


class NoteOwn(Interceptor):
    """Notes the states of explicitly given generators at their first draw.

    Attributes:
        begins: the states, by generator.
    """

    def __init__(self) -> None:
        know_operations()
        self.begins: dict[torch.Generator, Tensor] = {}

    def draw(self, func: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Calls the operation unchanged."""
        own = _own_generator(args, kwargs)
        if own is not None and own not in self.begins:
            self.begins[own] = own.get_state()
        return func(*args, **kwargs)


class RefuseInBackward(Interceptor):
    """Refuses draws in a backward, where recomputation would not repeat its forward's numbers."""

    def __init__(self, safe: set[object], action: Action, form: object) -> None:
        self._safe = safe
        self._action = action
        self._form = form

    def draw(self, func: Operation, args: Args, kwargs: Kwargs) -> Any:
        """Calls the operation, and raises RuntimeError if it has drawn."""
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

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        if exception[0] is None:
            self._safe.add(self._form)


def refusal(what: object, action: Action) -> RuntimeError:
    """The error for an operation that draws in a backward."""
    return RuntimeError(
        f"{what} draws random numbers in a backward ({action}): activation checkpointing of a "
        "layer with dropout cannot repeat the numbers of its forward here. Use recompute= of the "
        "pipeline in its place, checkpoint without dropout, or add noise of a hook after the step"
    )
