"""The model of a step as stages, whose bytes are measured once for all forms of the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..budget.level_costs import StageCosts, StageLevel
from ..budget.measure import StageTrials, named_levels
from ..partition.balance import Balance
from ..partition.chain import Chain, open_model, share_out
from ..partition.layers import make_stages
from ..partition.split_points import SplitAt
from ..pipeline.choose_plan import Schedule
from ..pipeline.memory import stages_on
from ..plan import Kind, Plan
from ..runtime.loss import Loss, Losses
from ..runtime.stage.stage import Stage
from ..tensors.parameters import bytes_of, gradient_bytes, gradient_dtype, held_by
from ..trace.routes import everywhere
from .parameters import state_bytes
from .with_values import WithValues
from .without_values import WithoutValues

_CPU = torch.device("cpu")
_REMEDY = "If it looks at values, as .item() does, give pykern.estimate with_values=True"


@dataclass(frozen=True)
class StepModel:
    """A model and how it is trained, with the bytes that were measured so far.

    All samples must be first rows of one batch.

    Attributes:
        model, devices, loss_fn, optimizer, schedule, balance, split_at, whole, with_values: as of
            `estimate`.
        options: for the schedule.
    """

    model: nn.Module | Sequence[nn.Module]
    devices: int
    loss_fn: Loss
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None
    schedule: Schedule = "one_f_one_b"
    balance: Balance | None = None
    split_at: SplitAt | None = None
    whole: Sequence[str] = ()
    with_values: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    # By the rows of a microbatch and the number of stages.
    _sized: dict[tuple[int, int], SizedStages] = field(default_factory=dict, init=False)
    # The bytes of the optimizer's state, by what its parameters are like.
    _states: dict[tuple[object, ...], int] = field(default_factory=dict, init=False)

    def sized(self, rows: int, num_stages: int, sample: Any, target: Any) -> SizedStages:
        """Its stages for a microbatch of so many rows."""
        key = rows, num_stages
        if key not in self._sized:
            self._sized[key] = SizedStages(self, num_stages, sample, target)
        return self._sized[key]

    def state_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """The bytes of the optimizer's state for parameters."""
        if self.optimizer is None:
            return 0
        alike = tuple(
            (type(one), one.shape, one.stride(), one.dtype, gradient_dtype(one))
            for one in parameters
        )
        if alike not in self._states:
            self._states[alike] = state_bytes(self.optimizer, parameters)
        return self._states[alike]


class SizedStages:
    """A copy of a model as stages for microbatches of one size.

    Args:
        of: the model.
        num_stages: the number of stages.
        sample: the input of one microbatch.
        target: of the loss for the sample.

    Attributes:
        cut: which layers each stage has.
    """

    def __init__(self, of: StepModel, num_stages: int, sample: Any, target: Any) -> None:
        self._of = of
        self._shapes = shapes = WithValues() if of.with_values else WithoutValues(_REMEDY)
        twin = shapes.model(of.model)
        sample, target = shapes.batch(sample), shapes.batch(target)
        with shapes.in_force():
            chain = open_model(twin, sample, num_stages, of.split_at, of.whole)
            of_layers = None if isinstance(chain, Chain) and of.balance != "memory" else sample
            self.cut = share_out(chain, num_stages, of.balance, of_layers, of.split_at)
            homes = [_CPU] * num_stages
            chain.cut(self.cut.stages, homes, everywhere)
            self._stages = make_stages(list(chain.layers.values()), self.cut, homes)
            self._losses = Losses.of_one(of.loss_fn, target)
            self._first = chain.first_arguments(sample)
        # By whether backwards are I and W.
        self._trials: dict[bool, StageTrials] = {}

    def costs(self, plan: Plan, levels: Sequence[StageLevel]) -> list[StageCosts]:
        """The bytes of the stages at these levels."""
        split = plan.has(Kind.I)
        with self._shapes.in_force():
            if split not in self._trials:
                self._trials[split] = StageTrials(
                    self._stages, self._first, self._losses, split=split, timed=False
                )
            return self._trials[split].costs(named_levels(levels))

    def held_alone(self, plan: Plan) -> list[tuple[float, float, float]]:
        """By device, the bytes of parameters, gradients and of what the optimizer keeps."""
        with self._shapes.in_force():
            return [
                self._of_parameters(stages_on(plan, self._stages, device))
                for device in range(plan.num_devices)
            ]

    def _of_parameters(self, stages: Sequence[Stage]) -> tuple[float, float, float]:
        """The bytes of parameters with buffers, of gradients, and of what the optimizer keeps."""
        parameters, buffers, trained = held_by(layer for of in stages for layer in of.originals)
        return (
            bytes_of([*parameters, *buffers]),
            gradient_bytes(trained),
            self._of.state_bytes(self._shapes.trained(trained)),
        )
