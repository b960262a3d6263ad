"""Changes of a training step that save memory, the cheapest in time first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..runtime import microbatch
from ..runtime.recompute.recompute import INPUTS, Level
from .estimates import Estimate, estimate


@dataclass(frozen=True)
class PlannedStep:
    """A training step on a whole batch, as `estimate` needs it.

    Attributes:
        inputs: the arguments of the model, for the batch.
        target: the target of the loss, for the batch; None without a target.
        microbatches: the number of microbatches.
        recompute: the recompute level, as for `Pipeline`.
        arguments: all other arguments of `estimate`.
    """

    inputs: Any
    target: Any
    microbatches: int
    recompute: Level | None
    arguments: dict[str, Any]

    def estimate(self) -> Estimate:
        """The estimate for the first microbatch, which is as large as any other."""
        both = self.inputs, self.target
        rows = microbatch.sizes(microbatch.batch_size(both), self.microbatches)
        sample, target = microbatch.split(both, rows)[0]
        return estimate(
            sample=sample,
            target=target,
            microbatches=self.microbatches,
            recompute=self.recompute,
            **self.arguments,
        )


@dataclass(frozen=True)
class Change:
    """A change, and the memory of the step with it."""

    name: str
    estimate: Estimate


def changes(step: PlannedStep) -> Iterator[Change]:
    """More microbatches of the same batch, the optimizer's state on the host, then recompute."""
    rows = microbatch.batch_size((step.inputs, step.target))
    finer = [step.microbatches * times for times in (2, 4) if step.microbatches * times <= rows]
    for count in finer:
        changed = replace(step, microbatches=count)
        yield Change(f"microbatches={count}", changed.estimate())
    if step.arguments.get("optimizer") is not None:
        on_host = replace(step, arguments=step.arguments | {"optimizer": None})
        yield Change("pykern.HostOptimizer", on_host.estimate())
    if step.recompute is not None:
        return
    for level in INPUTS:
        changed = replace(step, recompute=level)
        yield Change(f'recompute="{level}"', changed.estimate())
        for count in finer[-1:]:
            both = replace(changed, microbatches=count)
            yield Change(f'recompute="{level}", microbatches={count}', both.estimate())
