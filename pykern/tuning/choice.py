"""The result of tuning: proposals, the best first, and the pipeline of the best."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..columns import counted, in_columns
from ..partition.chain import call_of, max_stages
from ..pipeline.pipeline import Pipeline
from ..pipeline.profiled import tokens_of_row
from ..pipeline.tuned import Tuned
from .asked import Asked, refuse_chosen
from .measurements import Measurements
from .proposal import Proposal

COLUMNS = (
    "cut",
    "schedule",
    "microbatches",
    "replicas",
    "recompute",
    "predicted ms",
    "measured ms",
    "bubble",
    "peak MiB",
    "samples/s",
)
# Rows of the printed table.
SHOWN = 10


@dataclass(frozen=True, eq=False)
class Choice:
    """The result of `pykern.tune`.

    Attributes:
        asked: the model, batches and devices.
        measured: the measurements of the model.
        proposals: the ones that were run, the best first, then the rest by predicted time.
        num_simulated: the number of plans that were simulated.
    """

    asked: Asked
    measured: Measurements
    proposals: tuple[Proposal, ...]
    num_simulated: int

    @property
    def best(self) -> Proposal:
        """The first of the proposals."""
        return self.proposals[0]

    def pipeline(self, **more: Any) -> Pipeline:
        """The pipeline of the best proposal.

        Args:
            **more: further arguments of `Pipeline`, or others than `tune` was given.

        Raises:
            ValueError: an argument is one that `tune` has chosen.
        """
        refuse_chosen(more)
        best, devices = self.best, self._devices
        more = {"devices": devices, "recompute": best.levels, **more}
        return self.asked.pipeline(best.plan, best.spans, **more)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a file for `Pipeline(model, tuned=path)`: cut, plan and levels.

        Raises:
            OSError: the file cannot be written.
        """
        best = self.best
        Tuned(
            max_stages(self.asked.model),
            self._devices,
            self.asked.units.split_at(best.spans),
            best.levels,
            best.plan,
        ).save(path)

    @property
    def _devices(self) -> Sequence[str]:
        return self.asked.site.names[: self.best.plan.num_devices]

    def rows(self) -> Iterator[tuple[str, ...]]:
        """The table's rows, in the order of `columns`."""
        for one in self.proposals[:SHOWN]:
            yield self._row(one)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the table's columns."""
        return COLUMNS if self.tokens_of_row is None else (*COLUMNS, "tokens/s")

    @property
    def tokens_of_row(self) -> int | None:
        """The number of tokens in a row of the batch; None if rows are not rows of integers."""
        return tokens_of_row(call_of(self.asked.sample))

    def _row(self, one: Proposal) -> tuple[str, ...]:
        step_ns = one.predicted_ns if one.measured_ns is None else one.measured_ns
        samples = self.asked.rows / step_ns * 1e9
        row = (
            "+".join(map(str, one.cut)),
            one.schedule,
            f"{one.microbatches}",
            f"{one.replicas}",
            _levels(one.levels),
            f"{one.predicted_ns / 1e6:.2f}",
            "-" if one.measured_ns is None else f"{one.measured_ns / 1e6:.2f}",
            f"{one.bubble:.1%}",
            " ".join(f"{num_bytes / 2**20:.1f}" for num_bytes in one.peak_bytes),
            f"{samples:,.1f}",
        )
        tokens = self.tokens_of_row
        return row if tokens is None else (*row, f"{samples * tokens:,.0f}")

    def __str__(self) -> str:
        """The proposals as a table, the best first."""
        return f"{in_columns([self.columns, *self.rows()])}\n{self.about()}"

    def about(self) -> str:
        """The batches, devices and numbers of plans behind the table, in one line."""
        asked, measured = self.asked, self.measured
        num_devices, cores = len(asked.site.names), counted(measured.cores, "core")
        shared = f" that share {cores}" if measured.cores < num_devices else ""
        box = "" if asked.box is None else f" of {asked.box.name} ({asked.box.basis})"
        ran = sum(one.measured_ns is not None for one in self.proposals)
        return (
            f"batches of {counted(asked.rows, 'row')}, {counted(len(measured.units), 'unit')}, "
            f"{counted(num_devices, 'device')}{shared}{box}; "
            f"{counted(self.num_simulated, 'plan')} simulated, {ran} run"
        )


def _levels(levels: Sequence[Sequence[str | None]] | None) -> str:
    """The number of microbatches, summed over all stages, that have each level."""
    if levels is None:
        return "-"
    counts = Counter(level for of_stage in levels for level in of_stage if level is not None)
    return " ".join(f"{level} x{count}" for level, count in sorted(counts.items()))
