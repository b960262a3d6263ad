"""Changes of a training step that save memory, the cheapest in time first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..pipeline.choose_levels import RecomputeArgument
from ..runtime import microbatch
from ..runtime.recompute.recompute import INPUTS, LEVELS
from .estimates import Estimate, estimate_step
from .step_model import StepModel

# Told where a step fits with none of the changes.
NOT_ENOUGH = (
    "Neither more microbatches, nor the optimizer on the host, nor recompute saves enough. "
    "Take more devices."
)


@dataclass(frozen=True)
class PlannedStep:
    """A training step on a whole batch, as `estimate` needs it.

    Attributes:
        inputs: the arguments of the model, for the batch.
        target: the target of the loss, for the batch; None without a target.
        microbatches: the number of microbatches.
        recompute: the recompute level, or those of stages, as for `Pipeline`.
        of: the model, which keeps what was measured for other forms of this step.
    """

    inputs: Any
    target: Any
    microbatches: int
    recompute: RecomputeArgument
    of: StepModel

    def estimate(self) -> Estimate:
        """The estimate for the first microbatch, which is as large as any other."""
        both = self.inputs, self.target
        rows = microbatch.sizes(microbatch.batch_size(both), self.microbatches)
        sample, target = microbatch.split(both, rows)[0]
        return estimate_step(self.of, sample, target, self.microbatches, self.recompute)


def changes(step: PlannedStep) -> Iterator[tuple[str, Estimate]]:
    """Changes by name, and the memory of the step with each.

    More microbatches of the same batch, the optimizer's state on the host, then recompute.
    """
    rows = microbatch.batch_size((step.inputs, step.target))
    finer = [step.microbatches * times for times in (2, 4) if step.microbatches * times <= rows]
    for count in finer:
        changed = replace(step, microbatches=count)
        yield f"microbatches={count}", changed.estimate()
    if step.of.optimizer is not None:
        found = step.estimate()
        on_host = [replace(device, optimizer=0) for device in found.devices]
        yield "pykern.HostOptimizer", replace(found, devices=on_host)
    level = LEVELS[0] if step.recompute is None else step.recompute
    if not isinstance(level, str):
        # Stages have levels of their own, which the caller has chosen.
        return
    # Levels ascend by what they compute again.
    higher = LEVELS[LEVELS.index(level) + 1 :]
    for level in (each for each in higher if each in INPUTS):
        changed = replace(step, recompute=level)
        yield f'recompute="{level}"', changed.estimate()
        for count in finer[-1:]:
            both = replace(changed, microbatches=count)
            yield f'recompute="{level}", microbatches={count}', both.estimate()
