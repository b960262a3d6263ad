"""Finds whether the actions of a stage draw random numbers, and gives them their modes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from ...kernels import seeds
from ...modes import set_states
from ...plan import Action, Kind
from ...torch_private import dispatch_modes
from .compiled import Whole, WholeStates
from .eager import Begins, OwnState, RefuseInBackward, Repeat, know_operations, refusal
from .known import KnownState
from .seed import StepSeed, action_seed, default_generator, generators_lent

_NO_MODE = nullcontext()
_CPU = torch.device("cpu")


# Whether forwards drew, their most seeds, whether they drew seeds only, whether one may draw.
Facts = tuple[bool, int, bool, bool]


class Draws:
    """Watches whether the forward actions of a stage draw random numbers, and which numbers.

    `possible` is true until a watched action has drawn nothing, so that a stage without dropout
    pays for watching once. Each kind of backward action is watched in the same way. Watching starts
    again when the stage changes, for example between train and eval mode or in its parameters that
    require grad.

    Attributes:
        stage: its number.
        possible: whether a forward may draw.
        num_seeds: the largest number of kernel seeds that a forward has drawn.
        only_seeds: whether forwards have drawn kernel seeds only.
        generators: by default generator, the stage's generator in its place; each action seeds it.
        state: the random state of the running forward; None if the forward is not watched.
    """

    def __init__(self, stage: int) -> None:
        self.possible = True
        self.num_seeds = 0
        self.only_seeds = True
        self.state: OwnState | Whole | None = None
        self.stage = stage
        self._drew = False
        self.generators: dict[torch.Generator, torch.Generator] = {}
        # The generators of actions whose draws cannot be seen one by one; empty for other actions.
        self._whole: Sequence[torch.Generator] = ()
        self._mode: object = None
        self._safe: dict[Kind, set[object]] = {}

    def begin(
        self, seed: StepSeed, mode: object, device: torch.device = _CPU, *, compiled: bool = False
    ) -> None:
        """Starts a step.

        Args:
            seed: of the step.
            mode: any value that changes when other layers may draw.
            device: of the stage.
            compiled: whether the stage has compiled layers.
        """
        self._seed, self.state = seed, None
        # In inference mode, a mode of the caller is given dropout as one operation, not its draw.
        whole = compiled or (torch.is_inference_mode_enabled() and len(dispatch_modes()) > 0)
        self._whole = [default_generator(each) for each in {_CPU, device}] if whole else ()
        if mode != self._mode:
            self.possible = True
            self._drew = False
            self.num_seeds, self.only_seeds = 0, True
            self._safe.clear()
            # The mode is set last, so that this runs again after an interrupt.
            self._mode = mode
        if self.possible:
            know_operations()

    def watched(self, *, drew: bool, num_seeds: int, only_seeds: bool) -> None:
        """Takes the result of a forward action. A layer that drew once may draw again later."""
        self._drew = self._drew or drew
        self.possible = self._drew
        self.num_seeds = max(self.num_seeds, num_seeds)
        self.only_seeds = self.only_seeds and only_seeds

    @property
    def facts(self) -> Facts:
        """The facts that watched forwards have shown since the mode changed."""
        return self._drew, self.num_seeds, self.only_seeds, self.possible

    def know(self, facts: Facts) -> None:
        """Takes up the facts of an earlier step of the same mode, after steps of others."""
        self._drew, self.num_seeds, self.only_seeds, self.possible = facts

    def seeds_of(self, seed: StepSeed, microbatch: int, count: int) -> Tensor:
        """The first `count` seeds of a forward that draws only seeds: int64 [count]."""
        own = torch.Generator().manual_seed(action_seed(seed.value(), self.stage, microbatch))
        return torch.empty(count, dtype=torch.int64, device="cpu").random_(generator=own)

    def forward(self, microbatch: int) -> AbstractContextManager[OwnState | Whole | None]:
        """The mode of a forward action; an empty context if the action does not draw.

        The context is also empty in a capture, where seeds are provided: a GPU's generator refuses
        to return its state there.
        """
        if not self.possible or seeds.are_provided():
            return _NO_MODE
        seed, index = self._seed.of(microbatch)
        if self._whole:
            return self._whole_forward(seed, index)
        return OwnState(self, seed, index)

    def known(self) -> KnownState | None:
        """The modes of all forward actions on the CPU, if there is nothing left to watch."""
        own = torch.default_generator in self.generators
        watched = self.only_seeds or len(self._whole) > 0 or not own
        return None if watched else KnownState(self, self._seed)

    def backward(
        self, kind: Kind, microbatch: int, form: object = None
    ) -> AbstractContextManager[object]:
        """The mode of a backward action; an empty context once such an action has drawn nothing.

        Actions of different forms are watched apart: backwards of another part of the stage, or
        backwards to more inputs, because an earlier stage has begun to train.
        """
        if not self.possible or form in self.safe(kind) or seeds.are_provided():
            return _NO_MODE
        action = Action(kind, self.stage, microbatch)
        if self._whole:
            return self._whole_backward(action, form)
        return RefuseInBackward(self.safe(kind), action, form)

    def safe(self, kind: Kind) -> set[object]:
        """The forms of the backward actions of a kind that are known not to draw."""
        return self._safe.setdefault(kind, set())

    def _whole_forward(self, seed: StepSeed, index: int) -> AbstractContextManager[Whole]:
        number = action_seed(seed.value(), self.stage, index)

        def begin() -> None:
            for generator in self._whole:
                generator.manual_seed(number)

        def drew(any_drawn: bool) -> None:
            if any_drawn:
                seed.use()
            self.watched(drew=any_drawn, num_seeds=0, only_seeds=not any_drawn)

        return Whole(self._whole, begin, drew).held(generators_lent)

    def _whole_backward(self, action: Action, form: object) -> AbstractContextManager[Whole]:
        def drew(any_drawn: bool) -> None:
            if any_drawn:
                raise refusal("a compiled layer", action)
            self.safe(action.kind).add(form)

        return Whole(self._whole, lambda: None, drew).held(generators_lent)


def repeat(begins: Begins) -> AbstractContextManager[object]:
    """The mode in which random operations repeat their draws from these states."""
    if isinstance(begins, WholeStates):
        start = partial(set_states, begins)
        return Whole(list(begins), start, lambda _: None).held(generators_lent)
    return Repeat(begins) if begins else _NO_MODE
