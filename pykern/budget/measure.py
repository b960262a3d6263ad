"""Measures the costs of each stage at each recompute level, by running one microbatch through.

The measured stages are like those of the pipeline, with copies of their layers: the same
parameters, but separate gradients. The state of layers, that of generators of random numbers and
the gradients of the loss's own parameters are put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..plan import Kind, Plan
from ..runtime.recompute.recompute import INPUTS, LEVELS, Level
from ..runtime.stage.layer_copies import copy_layers
from ..runtime.stage.stage import Finish, Stage
from ..runtime.stage.transport import connect
from .level_costs import HeldBytes, LevelCost, Rebuilt, StageCosts, StageLevel
from .trial import Trial
from .trial_chain import ByLevel, Copies, CostsOfActions, TrialChain

# The bytes of the gradient that a microbatch's backward starts from, which is one number.
_LARGEST_NUMBER = 8


def named_levels(levels: Sequence[StageLevel]) -> list[Level]:
    """The levels that stages have, those of kernels first."""
    named = {level for one in levels for level in (one.kept, one.rebuilt)}
    return [level for level in LEVELS if level in named]


class StageTrials:
    """Copies of stages, and the costs that trials of them have measured so far.

    A time is the best of three runs, after two that warm up.

    Args:
        stages: all stages of one replica, on their devices.
        arguments: arguments of the first layer, for one microbatch.
        finish: as of a step; called with microbatch 0.
        split: whether backwards are I and W.
        timed: whether to measure times; otherwise they are 0, and levels warm up once.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        arguments: tuple[Any, ...],
        finish: Finish,
        *,
        split: bool,
        timed: bool,
    ) -> None:
        self._stages, self._finish, self._split = stages, finish, split
        self._parameters: list[nn.Parameter] = []
        with torch.inference_mode(False), torch.enable_grad():
            copies = [self._copy(stage) for stage in stages]
            connect(copies)
            for stage in copies:
                stage.transport = Copies([each.device for each in copies])
            self._chain = TrialChain(copies, arguments, split=split, timed=timed)
        self._known: ByLevel = {}

    def costs(self, levels: Sequence[Level]) -> list[StageCosts]:
        """The costs of the stages at each of these levels; measured levels are not run again."""
        if missing := [level for level in levels if level not in self._known]:
            with self.tried(missing[0]) as chain:
                for level in missing:
                    self._known[level] = chain.at(level, self._finish)
        costs = {level: self._known[level] for level in levels}
        return [_of_stage(costs, of.index, split=self._split) for of in self._stages]

    @contextmanager
    def tried(self, level: Level) -> Iterator[TrialChain]:
        """The copies, which leave nothing behind, after a first run at this level."""
        trial = Trial(self._finish)
        with torch.inference_mode(False), torch.enable_grad(), trial.without_trace(self._stages):
            try:
                with trial.noting:
                    self._chain.run(level, trial.first)
                yield self._chain
            finally:
                for parameter in self._parameters:
                    parameter.grad = None

    def _copy(self, stage: Stage) -> Stage:
        layers, pairs = copy_layers(stage.layers, stage.device)
        self._parameters += [copied for _, copied in pairs]
        return Stage(stage.index, layers, stage.device)


def with_starts(costs: Sequence[StageCosts], plan: Plan) -> list[StageCosts]:
    """The costs with the starting gradients of all microbatches, which are made with the first."""
    starts = float(_LARGEST_NUMBER * plan.num_microbatches)
    return [*costs[:-1], replace(costs[-1], step_bytes=starts)]


def _of_stage(costs: ByLevel, stage: int, *, split: bool) -> StageCosts:
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


def _held(costs: CostsOfActions, stage: int) -> HeldBytes:
    """The bytes that a microbatch of the stage holds at the level of these costs."""
    mine = {kind: cost for (kind, of), cost in costs.items() if of == stage}
    changes = {key: cost.others.get(stage, 0) for key, cost in costs.items()}
    return HeldBytes(
        {kind: cost.held_bytes for kind, cost in mine.items()},
        {kind: cost.workspace_bytes for kind, cost in mine.items()},
        {key: change for key, change in changes.items() if change},
    )
