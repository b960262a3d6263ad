"""Recompute levels that fit a memory budget: measured on one microbatch, chosen by the planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ..notes import add_note
from ..plan import Kind, Plan
from ..plan.counts import one_for_each
from ..runtime.loss import Loss, Losses
from ..runtime.microbatch import batch_size
from ..runtime.recompute.recompute import INPUTS, Level
from ..runtime.stage.stage import Stage
from .fit import Fitted, fit
from .level_costs import StageCosts
from .measure import StageTrials, with_starts

_KEEP_BITS: tuple[Level, ...] = ("none", "ops", *INPUTS)


@dataclass(frozen=True)
class Budget:
    """A memory budget, for which `Pipeline(recompute=...)` chooses levels by stage and microbatch.

    A microbatch is run a few times at each level, to measure the times of its actions and the bytes
    they hold; no gradient, buffer or random number of the model or the loss changes. Forward hooks
    are called, as is the loss function. Then the levels with the shortest predicted step are chosen
    among the levels that fit.

    Attributes:
        num_bytes: the bytes that each device may hold in activations and in workspace of its
            actions: one number for all devices or one for each. Parameters, gradients, optimizer
            states and reserves of an allocator are not counted.
        sample: an input as large as one microbatch, as for `Pipeline`: a tuple has the arguments
            of the first layer.
        target: the second argument of the loss for the sample; None if `step` gets no target.
        stash: whether "ops+stash" may be chosen, which changes gradients.
    """

    num_bytes: float | Sequence[float]
    sample: Any
    target: Any = None
    stash: bool = False

    def measure(
        self, plan: Plan, stages: Sequence[Stage], loss_fn: Loss | None
    ) -> list[StageCosts]:
        """The costs of these stages at each level.

        Raises:
            ValueError: there is no loss, the number of budgets is not that of the devices, or the
                sample cannot be a microbatch or has no rows.
            BaseException: the exception that a layer or the loss raised for the sample, with a
                note.
        """
        if loss_fn is None:
            raise ValueError(
                "loss_fn must be given for a memory budget, got None. A budget is for training: "
                "Pipeline(..., loss_fn=...)"
            )
        self._of_devices(plan.num_devices)
        # A sample without rows is refused: no action would run, and no memory would seem held.
        batch_size({"sample": self.sample, "target": self.target})
        in_one_memory = all(stage.device.type == "cpu" for stage in stages)
        losses = Losses.of_one(loss_fn, self.target, in_one_memory=in_one_memory)
        levels: tuple[Level, ...] = (*_KEEP_BITS, "ops+stash") if self.stash else _KEEP_BITS
        try:
            split = plan.has(Kind.I)
            arguments = self.sample if isinstance(self.sample, tuple) else (self.sample,)
            trials = StageTrials(stages, arguments, losses, split=split, timed=True)
            costs = trials.costs(levels)
        except BaseException as error:
            add_note(error, "raised while the sample of a Budget ran")
            if self.target is None and isinstance(error, TypeError):
                add_note(error, "a loss that takes a target needs Budget(..., target=...)")
            raise
        return with_starts(costs, plan)

    def fit(self, plan: Plan, costs: Sequence[StageCosts]) -> Fitted:
        """The levels for a plan over stages of these costs.

        Raises:
            ValueError: the number of budgets is not that of the devices, or a budget is too small
                at every level.
        """
        return fit(plan, costs, self._of_devices(plan.num_devices))

    def _of_devices(self, num_devices: int) -> list[float]:
        budgets = one_for_each("num_bytes", self.num_bytes, num_devices, "devices")
        for device, budget in enumerate(budgets):
            if not (isinstance(budget, Real) and float(budget) > 0):
                raise ValueError(f"num_bytes must be above 0, got {budget!r} for device {device}")
        return [float(budget) for budget in budgets]
