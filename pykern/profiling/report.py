"""The report of a profile, as tables, as a page, and as a trace."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..boxes import Box, load
from ..columns import counted
from ..plan import Action, Step, Timeline, critical_path, simulate
from .causes import Causes, causes_of
from .changes import Improvement, changes_of
from .drawn import WithTimelines
from .observed import Observed
from .tables import (
    Sheet,
    in_ms,
    of_causes,
    of_changes,
    of_devices,
    of_layers,
    of_path,
    of_stages,
)


@dataclass(frozen=True)
class Report(WithTimelines):
    """Why a step takes its time, and what would shorten it. Its string has all tables.

    Attributes:
        seen: the facts.
        causes: the parts of the makespan, the largest cause first.
        changes: changes that shorten a step, the best first; at most three.
        predicted: the simulated timeline with the measured costs.
        more: tables besides the usual ones.
        details: timelines below the measured one, such as that of single kernels.
    """

    command = "pykern profile"

    seen: Observed
    causes: Causes
    changes: Sequence[Improvement]
    predicted: Timeline
    more: Sequence[Sheet] = ()
    details: Mapping[str, Timeline] = field(default_factory=dict)

    @property
    def first_cause(self) -> str:
        """The name of the largest cause."""
        return self.causes.found[0].name

    @property
    def critical_path(self) -> Sequence[Step]:
        """The actions that determine the end of the step, each with the reason for its start."""
        return critical_path(self.seen.plan, self.seen.timeline)

    @property
    def flops_per_ns(self) -> float | None:
        """The model's operations per nanosecond, without recompute; None if they are not known."""
        seen = self.seen
        return seen.flops / seen.step_ns if seen.flops and seen.step_ns else None

    @property
    def flops_ratio(self) -> float | None:
        """The model's operations by those that the devices could do, 0 to 1; None if not known."""
        rate, peak = self.flops_per_ns, self.seen.peak_flops_per_ns
        return rate / peak if rate and peak else None

    def on_box(self, box: Box | str | os.PathLike[str]) -> Report:
        """The report with the rates of a box, whose first devices those of the plan are.

        Args:
            box: a profile, its file, or the name of one that comes with pykern.

        Raises:
            OSError: the file cannot be read.
            ValueError: there is no such profile, or its box has fewer devices, or does not tell
                their operations per time.
        """
        box = box if isinstance(box, Box) else load(box)
        count = self.seen.plan.num_devices
        rates = [device.flops_per_ns for device in box.devices[:count]]
        if len(rates) < count or not all(rates):
            raise ValueError(
                f"box must have {counted(count, 'device')} with flops_per_ns, got "
                f"{sum(map(bool, rates))}. Write it into the profile"
            )
        seen = replace(self.seen, peak_flops_per_ns=sum(rate for rate in rates if rate))
        return replace(self, seen=seen)

    def tables(self) -> list[Sheet]:
        """All tables, in their order."""
        return [
            of_causes(self.seen, self.causes),
            of_devices(self.seen),
            of_stages(self.seen),
            *([of_layers(self.seen)] if self.seen.layer_ns else []),
            of_path(self.seen),
            of_changes(self.changes),
            *self.more,
        ]

    def summary(self) -> str:
        """The step in a sentence or two."""
        seen, plan = self.seen, self.seen.plan
        batch, told = "", ""
        if seen.rows is not None:
            batch = f"of {counted(seen.rows, 'row')} "
            rate = seen.rows / seen.step_ns * 1e9 if seen.step_ns else 0.0
            tokens = seen.tokens_of_row
            told = f" ({rate:,.0f} rows/s"
            told += ")" if tokens is None else f", {rate * tokens:,.0f} tokens/s)"
        return (
            f"{counted(seen.num_steps, 'step')} {batch}in "
            f"{counted(plan.num_microbatches, 'microbatch')}, {counted(plan.num_stages, 'stage')} "
            f"on {counted(plan.num_devices, 'device')}. A step takes "
            f"{seen.step_ns / 1e6:.2f} ms{told}, its actions {in_ms(seen.timeline.makespan_ns)} "
            f"ms, and {in_ms(self.predicted.makespan_ns)} ms as predicted. The bubble ratio is "
            f"{seen.timeline.bubble_ratio:.3f}, and {self.predicted.bubble_ratio:.3f} as predicted."
            f"{self._rate()}{self._hidden()}"
        )

    def _rate(self) -> str:
        rate, ratio = self.flops_per_ns, self.flops_ratio
        of_peak = "" if ratio is None else f", {ratio:.1%} of what the box could do (MFU)"
        return "" if rate is None else f" The model does {rate / 1e3:.3g} TFLOP/s{of_peak}."

    def _hidden(self) -> str:
        share = self.seen.hidden_copies
        return "" if share is None else f" Some device works beside {share:.0%} of copies."

    def timelines(self) -> dict[str, Timeline]:
        """Planned above measured, and details below."""
        return {"planned": self.predicted, "measured": self.seen.timeline, **self.details}

    def held_by_action(self) -> Mapping[Action, float]:
        """By action, the bytes of activations that its device would hold more."""
        return self.seen.held_by_action


def report_of(seen: Observed) -> Report:
    """The report about some steps."""
    return Report(seen, causes_of(seen), changes_of(seen), simulate(seen.plan, seen.costs))
