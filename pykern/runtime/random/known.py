"""The interceptor of a stage whose draws on the CPU are known, for one action after another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...torch_private import Interceptor
from .eager import OwnState
from .seed import StepSeed, mixed

if TYPE_CHECKING:
    from .draws import Draws


class KnownState(OwnState):
    """As `OwnState`, for one action after another of a stage that is known to draw on the CPU.

    Args:
        draws: of the stage.
        seed: of the step, or of all batches in flight.
    """

    # Nothing is watched.
    __exit__ = Interceptor.__exit__

    def __init__(self, draws: Draws, seed: StepSeed) -> None:
        # Nothing is seeded yet: a stage may be composed anew while its F draws.
        self._draws, self._steps = draws, seed
        self._is_known = True
        self._first = draws.generators[torch.default_generator]

    def of(self, microbatch: int) -> OwnState:
        """The state of a microbatch's action; ends the state of the action before it."""
        seed, index = self._steps.of(microbatch)
        # The first draw of a step takes its seed.
        if not seed.is_used:
            return OwnState(self._draws, seed, index)
        self._seed, self._microbatch = seed, index
        self._seeded = {torch.default_generator: self._first}
        stage = self._draws.stage
        self._number = mixed(seed.of_stages.get(stage) or seed.of_stage(stage), index)
        self.generator, self._noted = self._first.manual_seed(self._number), None
        self._is_fresh = True
        return self
