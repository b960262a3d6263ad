"""Random numbers of concurrent stages, reproducible for any timing of threads.

torch has one default generator for the CPU and one for each GPU, and stages that run at the same
time would draw from it in the order in which they happen to arrive. So every forward action draws
from its own states, keyed by (step, stage, microbatch); the key of the step is one number drawn
from the caller's default generator on the CPU by the first action that needs it. The plain model
draws the same numbers when `torch.manual_seed(action_seed(step_seed, stage, microbatch))`, which
seeds the generators of all devices, precedes each stage of each microbatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _C
from ...forks import fork_safe_lock
from ...torch_private import without_transforms

# Held while a default generator is in the state of an action.
generators_lent = fork_safe_lock()

_MASK = (1 << 64) - 1


def action_seed(step_seed: int, stage: int, microbatch: int) -> int:
    """Seed of a forward action: 64 bits, mixed by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    return mixed(mixed(step_seed, stage), microbatch)


def mixed(seed: int, value: int) -> int:
    """A seed of 64 bits, mixed with a value."""
    seed = (seed + 0x9E3779B97F4A7C15 * (value + 1)) & _MASK
    seed = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    seed = ((seed ^ (seed >> 27)) * 0x94D049BB133111EB) & _MASK
    return seed ^ (seed >> 31)


class StepSeed:
    """The next random number of torch's default generator, which advances when the number is used.

    So a model that does not draw leaves the caller's generator unchanged.

    Attributes:
        is_used: whether the number has been taken from the caller's generator.
        of_stages: by stage, the number mixed with the stage, for `mixed` with a microbatch.
    """

    def __init__(self) -> None:
        self._value: int | None = None
        # The state of the caller's generator after the number, until the number is used.
        self._behind: Tensor | None = None
        self.is_used = False
        self.of_stages: dict[int, int] = {}

    def of(self, microbatch: int) -> tuple[StepSeed, int]:
        """The seed of a microbatch's step, and the index of the microbatch in the step."""
        return self, microbatch

    def value(self) -> int:
        """The number, which is the same for all callers in one step."""
        if self._value is not None:
            return self._value
        with generators_lent:
            if self._value is None:
                generator = torch.default_generator
                # The layer that draws first may be within torch.vmap.
                with without_transforms(), _C.Undo(generator.set_state, generator.get_state()):
                    draw = torch.empty((), dtype=torch.int64, device="cpu").random_()
                    self._behind = generator.get_state()
                    self._value = int(draw.item())
            return self._value

    def of_stage(self, stage: int) -> int:
        """The entry of `of_stages`, which is made if needed."""
        return self.of_stages.setdefault(stage, mixed(self.value(), stage))

    def use(self) -> None:
        """Takes the number from the caller's generator. Later calls change nothing."""
        with generators_lent:
            if self._behind is not None:
                torch.default_generator.set_state(self._behind)
                self._behind = None
                self.is_used = True


def default_generator(device: torch.device) -> torch.Generator:
    """The generator from which random operations on a device draw."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
