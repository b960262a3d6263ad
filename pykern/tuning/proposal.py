"""A proposal: one way to run a model's steps, with its predicted and measured time."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline.choose_levels import Levels
from ..plan import Plan


@dataclass(frozen=True)
class Proposal:
    """A cut with a plan for it.

    Attributes:
        schedule: its name and options; "auto" for one of `pykern.search`.
        plan: the plan on all devices, with its replicas and the R of recomputed microbatches.
        spans: by stage, the units of the model.
        replicas: the number of copies of the schedule's plan side by side.
        levels: the level of each forward; None for the level of the kernels.
        predicted_ns: the predicted time of a step.
        bubble: share of the devices' time without an action, as predicted, 0...1.
        weights_bytes: by device, the bytes of parameters, gradients and state of the optimizer.
        activation_bytes: by device, the predicted peak of activations.
        measured_ns: the median time of a step; None if the proposal was not run.
    """

    schedule: str
    plan: Plan
    spans: tuple[range, ...]
    replicas: int
    levels: Levels | None
    predicted_ns: float
    bubble: float
    weights_bytes: tuple[float, ...] = ()
    activation_bytes: tuple[float, ...] = ()
    measured_ns: float | None = None

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """By device, the predicted peak of all that it holds."""
        pairs = zip(self.weights_bytes, self.activation_bytes, strict=True)
        return tuple(weights + held for weights, held in pairs)

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.plan.num_microbatches

    @property
    def cut(self) -> tuple[int, ...]:
        """By stage, the number of its units."""
        return tuple(len(span) for span in self.spans)

    @property
    def kind(self) -> tuple[str, int, int]:
        """The same for proposals that take nearly the same time, but for their options and cut."""
        return self.schedule.partition(" ")[0], self.microbatches, self.replicas
