"""One way to run a model's steps, with what it is predicted and measured to take."""

from __future__ import annotations

from dataclasses import dataclass

from ..pipeline.choose_levels import Levels
from ..plan import Plan


@dataclass(frozen=True)
class Proposal:
    """A cut with a plan for it.

    Attributes:
        schedule: its name and options; "auto" for one of `pykern.search`.
        plan: as it runs, on all devices, with its replicas and the R of what is recomputed.
        spans: by stage, the units of the model.
        replicas: how many copies of the schedule's plan stand side by side.
        levels: what each forward keeps; None for what kernels keep anyway.
        predicted_ns: of a step.
        bubble: share of the devices' time without an action, as predicted, 0...1.
        peak_bytes: by device, as predicted: parameters, gradients, state of the optimizer and
            activations.
        measured_ns: the median step; None where it was not run.
    """

    schedule: str
    plan: Plan
    spans: tuple[range, ...]
    replicas: int
    levels: Levels | None
    predicted_ns: float
    bubble: float
    peak_bytes: tuple[float, ...] = ()
    measured_ns: float | None = None

    @property
    def microbatches(self) -> int:
        """The number of microbatches of a step."""
        return self.plan.num_microbatches

    @property
    def cut(self) -> tuple[int, ...]:
        """By stage, how many units it has."""
        return tuple(len(span) for span in self.spans)

    @property
    def kind(self) -> tuple[str, int, int]:
        """Proposals of one kind take nearly the same time: options and cut set them apart."""
        return self.schedule.partition(" ")[0], self.microbatches, self.replicas
