"""One microbatch that runs through stages, one action after another, and its costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..plan import Kind
from ..runtime.microbatch import to_device
from ..runtime.random.seed import StepSeed
from ..runtime.recompute.recompute import INPUTS, Level
from ..runtime.stage.stage import Finish, Stage
from ..runtime.stage.transport import Transport
from ..tensors.sparse import all_bytes
from ..tensors.trees import map_tensors
from .live_bytes import LiveBytes

_REPEATS = 3


@dataclass
class ActionCost:
    """The costs of one action: its times, the bytes it leaves behind, and its workspace."""

    times_ns: list[int] = field(default_factory=list)
    held_bytes: int = 0
    workspace_bytes: int = 0
    handed_bytes: int = 0
    # By other stage, how much more that stage holds after the action.
    others: dict[int, int] = field(default_factory=dict)

    @property
    def time_ns(self) -> float:
        """The shortest time; 0 without times."""
        return min(self.times_ns, default=0)


# The costs of actions by kind and stage.
CostsOfActions = dict[tuple[Kind, int], ActionCost]
# The costs of actions that were measured, by level.
ByLevel = dict[Level, CostsOfActions]
# A function that runs an action; it gets the action's kind and stage, and the action's function.
_Around = Callable[[tuple[Kind, int], Callable[[], None]], None]


class TrialChain:
    """Stages with one microbatch, one action after another."""

    def __init__(
        self, stages: Sequence[Stage], arguments: tuple[Any, ...], *, split: bool, timed: bool
    ) -> None:
        self._stages = stages
        self._timed = timed
        # The levels of all runs.
        self._ran: list[Level] = []
        self._arguments = to_device(arguments, stages[0].device)
        self._backward = (Kind.I, Kind.W) if split else (Kind.B,)

    def at(self, level: Level, finish: Finish) -> CostsOfActions:
        """The costs of each action of each stage at this level."""
        costs: CostsOfActions = {}
        # The first run makes gradients. The first with R learns which operations R leaves out.
        warms_up = self._ran[-1] != level or (level in INPUTS and len(self._ran) < 2)
        for _ in range(2 if self._timed else warms_up):
            self.run(level, finish)
        lives = [LiveBytes() for _ in self._stages]

        def weigh(key: tuple[Kind, int], action: Callable[[], None]) -> None:
            before = [live.now for live in lives]
            costs[key] = _weigh(lives[key[1]], action)
            changes = [live.now - was for live, was in zip(lives, before, strict=True)]
            costs[key].handed_bytes = self._handed_bytes(key)
            costs[key].others = {s: change for s, change in enumerate(changes) if s != key[1]}

        self.run(level, finish, weigh)
        for _ in range(_REPEATS if self._timed else 0):
            self.run(level, finish, lambda key, action: self._time(costs[key], key[1], action))
        return costs

    def run(
        self, level: Level, finish: Finish, around: _Around = lambda _, action: action()
    ) -> None:
        """Runs all actions of a step at this level, each through `around`."""
        self._ran.append(level)
        seed = StepSeed()
        for stage in self._stages:
            stage.begin(1, seed, finish, [level])
        # A layer may write into its arguments, so each run gets copies.
        self._stages[0].enter([map_tensors(_leaf, self._arguments)])
        try:
            for stage in self._stages:
                around((Kind.F, stage.index), partial(stage.forward, 0))
            for stage in reversed(self._stages):
                if level in INPUTS:
                    around((Kind.R, stage.index), partial(stage.recompute, 0))
                kind = self._backward[0]
                around((kind, stage.index), partial(_backward, stage, kind))
            # Ws run in the order of stages, so that the later stage frees what two stages hold
            # together, as in a step.
            for kind in self._backward[1:]:
                for stage in self._stages:
                    around((kind, stage.index), partial(_backward, stage, kind))
        finally:
            for stage in self._stages:
                stage.end()

    def _handed_bytes(self, key: tuple[Kind, int]) -> int:
        """The bytes of the tensors that an F hands to the next stage and that get gradients."""
        kind, stage = key
        if kind is not Kind.F or stage + 1 == len(self._stages):
            return 0
        return sum(map(all_bytes, self._stages[stage].outputs[0]))

    def _time(self, cost: ActionCost, stage: int, action: Callable[[], None]) -> None:
        device = self._stages[stage].device
        _wait_for(device)
        start = time.perf_counter_ns()
        action()
        _wait_for(device)
        cost.times_ns.append(time.perf_counter_ns() - start)


class Copies(Transport):
    """Copies outputs and gradients to the device of the stage that reads them."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices

    def there(self, microbatch: int, reader: int, outputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """The outputs on the later stage's device."""
        del microbatch
        return to_device(tuple(outputs), self._devices[reader])  # type: ignore[no-any-return]

    def back(
        self, microbatch: int, maker: int, gradients: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        """The gradients on the earlier stage's device."""
        del microbatch
        return to_device(tuple(gradients), self._devices[maker])  # type: ignore[no-any-return]


def _backward(stage: Stage, kind: Kind) -> None:
    if kind is Kind.B:
        stage.backward(0)
    elif kind is Kind.I:
        stage.input_gradients(0)
    else:
        stage.weight_gradients(0)


def _weigh(live: LiveBytes, action: Callable[[], None]) -> ActionCost:
    before = live.now
    live.reset_peak()
    with live:
        action()
    return ActionCost(
        held_bytes=live.now - before,
        workspace_bytes=max(live.peak - max(before, live.now), 0),
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
