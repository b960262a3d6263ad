"""Measures the costs of each stage at each recompute level, by running one microbatch through.

The measured stages are like those of the pipeline, with copies of their layers: the same
parameters, but separate gradients. Buffers, the states of random number generators and the
gradients of the loss's own parameters are put back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..plan import Kind, Plan
from ..runtime.microbatch import to_device
from ..runtime.random.seed import StepSeed
from ..runtime.recompute.recompute import INPUTS, LEVELS, Level
from ..runtime.stage.layer_copies import copy_layers
from ..runtime.stage.stage import Finish, Stage
from ..runtime.stage.transport import Transport, connect
from ..tensors.trees import map_tensors
from .level_costs import HeldBytes, LevelCost, Rebuilt, StageCosts, StageLevel
from .live_bytes import LiveBytes
from .trial import Trial

_REPEATS = 3
# The bytes of the gradient that a microbatch's backward starts from, which is one number.
_LARGEST_NUMBER = 8


@dataclass
class _Cost:
    """The costs of one action: its times, the bytes it leaves behind, and its workspace."""

    times_ns: list[int] = field(default_factory=list)
    held_bytes: int = 0
    workspace_bytes: int = 0
    handed_bytes: int = 0
    # By other stage, how much more that stage holds after the action.
    others: dict[int, int] = field(default_factory=dict)

    @property
    def time_ns(self) -> float:
        return min(self.times_ns, default=0)


# The costs of actions by kind and stage.
_Costs = dict[tuple[Kind, int], _Cost]
# A function that runs an action; it gets the action's kind and stage, and the action's function.
_Around = Callable[[tuple[Kind, int], Callable[[], None]], None]


def measure(
    stages: Sequence[Stage],
    arguments: tuple[Any, ...],
    finish: Finish,
    levels: Sequence[Level],
    *,
    split: bool,
    timed: bool = True,
) -> list[StageCosts]:
    """The costs of stages at each level: the best of three runs, after two that warm up.

    Args:
        stages: all stages of one replica, on their devices.
        arguments: arguments of the first layer, for one microbatch.
        finish: as of a step; called with microbatch 0.
        levels: the levels to measure, at least one of them a level of the kernels.
        split: whether backwards are I and W.
        timed: whether to measure times; otherwise they are 0, and each level runs twice.
    """
    with tried(stages, arguments, finish, levels[0], split=split, timed=timed) as chain:
        costs = {level: chain.at(level, finish) for level in levels}
    return [_of_stage(costs, stage, split=split) for stage in range(len(stages))]


@contextmanager
def tried(
    stages: Sequence[Stage],
    arguments: tuple[Any, ...],
    finish: Finish,
    level: Level,
    **how: bool,
) -> Iterator[TrialChain]:
    """Copies of the stages, which leave nothing behind, after a first run at this level."""
    trial = Trial(finish)
    with torch.inference_mode(False), torch.enable_grad(), trial.without_trace(stages):
        copies = [
            Stage(stage.index, copy_layers(stage.layers, stage.device)[0], stage.device)
            for stage in stages
        ]
        connect(copies)
        for stage in copies:
            stage.transport = _Move([stage.device for stage in copies])
        chain = TrialChain(copies, arguments, **how)
        with trial.noting:
            chain.run(level, trial.first)
        yield chain


def measure_bytes(
    stages: Sequence[Stage],
    arguments: tuple[Any, ...],
    finish: Finish,
    plan: Plan,
    levels: Sequence[StageLevel],
) -> list[StageCosts]:
    """The bytes of stages at the level of each, without times. The arguments are as of `measure`.

    Args:
        stages: likewise.
        arguments: likewise.
        finish: likewise.
        plan: whose backwards count.
        levels: one for each stage.
    """
    named = {level for one in levels for level in (one.kept, one.rebuilt)}
    chosen = [level for level in LEVELS if level in named]
    return measure(stages, arguments, finish, chosen, split=plan.has(Kind.I), timed=False)


def with_starts(costs: Sequence[StageCosts], plan: Plan) -> list[StageCosts]:
    """The costs with the starting gradients of all microbatches, which are made with the first."""
    starts = float(_LARGEST_NUMBER * plan.num_microbatches)
    return [*costs[:-1], replace(costs[-1], step_bytes=starts)]


def _of_stage(costs: dict[Level, _Costs], stage: int, *, split: bool) -> StageCosts:
    kept: dict[str, LevelCost] = {}
    rebuilt: dict[str, Rebuilt] = {}
    kinds = (Kind.I, Kind.W) if split else (Kind.B,)
    # Levels of kernels come first.
    for level, of_level in costs.items():
        forward, held = of_level[Kind.F, stage], _held(of_level, stage)
        first, *_ = backwards = [of_level[kind, stage] for kind in kinds]
        backward_ns = sum(cost.time_ns for cost in backwards)
        if level in INPUTS:
            again = of_level[Kind.R, stage]
            inputs, whole = forward.held_bytes, forward.held_bytes + again.held_bytes
            # R's activations depend on the kernels' own level alone, which is the default level.
            usual_ns = kept.get("ops", next(iter(kept.values()))).backward_ns
            longer_ns = max(backward_ns - usual_ns, 0.0)
            rebuilt[level] = Rebuilt(again.time_ns, inputs, whole, longer_ns, held)
            continue
        kept[level] = LevelCost(forward.time_ns, backward_ns, forward.held_bytes, held=held)
        if split:
            kept[level] = replace(
                kept[level],
                weights_bytes=max(forward.held_bytes + first.held_bytes, 0),
                input_share=first.time_ns / backward_ns if backward_ns else 0.5,
            )
    of_stage = [
        {kind: cost for (kind, of), cost in of_level.items() if of == stage}
        for of_level in costs.values()
    ]
    return StageCosts(
        kept,
        rebuilt,
        max(cost.workspace_bytes for actions in of_stage for cost in actions.values()),
        max(sum(cost.held_bytes for cost in actions.values()) for actions in of_stage),
        handed_bytes=max(cost.handed_bytes for each in of_stage for cost in each.values()),
    )


def _held(costs: _Costs, stage: int) -> HeldBytes:
    """The bytes that a microbatch of the stage holds at the level of these costs."""
    mine = {kind: cost for (kind, of), cost in costs.items() if of == stage}
    changes = {key: cost.others.get(stage, 0) for key, cost in costs.items()}
    return HeldBytes(
        {kind: cost.held_bytes for kind, cost in mine.items()},
        {kind: cost.workspace_bytes for kind, cost in mine.items()},
        {key: change for key, change in changes.items() if change},
    )


class TrialChain:
    """Stages with one microbatch, one action after another."""

    def __init__(
        self, stages: Sequence[Stage], arguments: tuple[Any, ...], *, split: bool, timed: bool
    ) -> None:
        self._stages = stages
        self._num_warm, self._num_timed = (2, _REPEATS) if timed else (1, 0)
        self._arguments = to_device(arguments, stages[0].device)
        self._backward = (Kind.I, Kind.W) if split else (Kind.B,)

    def at(self, level: Level, finish: Finish) -> _Costs:
        """The costs of each action of each stage at this level."""
        costs: _Costs = {}
        for _ in range(self._num_warm):
            self.run(level, finish)
        lives = [LiveBytes() for _ in self._stages]

        def weigh(key: tuple[Kind, int], action: Callable[[], None]) -> None:
            before = [live.now for live in lives]
            costs[key] = _weigh(lives[key[1]], action)
            changes = [live.now - was for live, was in zip(lives, before, strict=True)]
            costs[key].handed_bytes = self._handed_bytes(key)
            costs[key].others = {s: change for s, change in enumerate(changes) if s != key[1]}

        self.run(level, finish, weigh)
        for _ in range(self._num_timed):
            self.run(level, finish, lambda key, action: self._time(costs[key], key[1], action))
        return costs

    def run(
        self, level: Level, finish: Finish, around: _Around = lambda _, action: action()
    ) -> None:
        """Runs all actions of a step at this level, each through `around`."""
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
        return sum(tensor.nbytes for tensor in self._stages[stage].outputs[0])

    def _time(self, cost: _Cost, stage: int, action: Callable[[], None]) -> None:
        device = self._stages[stage].device
        _wait_for(device)
        start = time.perf_counter_ns()
        action()
        _wait_for(device)
        cost.times_ns.append(time.perf_counter_ns() - start)


class _Move(Transport):
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


def _weigh(live: LiveBytes, action: Callable[[], None]) -> _Cost:
    before = live.now
    live.reset_peak()
    with live:
        action()
    return _Cost(
        held_bytes=live.now - before,
        workspace_bytes=max(live.peak - max(before, live.now), 0),
    )


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
