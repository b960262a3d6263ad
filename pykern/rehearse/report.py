"""The report of a rehearsal: what was computed, what is predicted, and what was only checked."""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..boxes import Box
from ..plan import Plan, Timeline
from ..plan.files import write_text
from ..profiling.drawn import WithTimelines
from ..profiling.tables import Sheet
from ..sizes.changes import NOT_ENOUGH
from .host_waits import HostWait
from .memory import Fit
from .order import Orders
from .prediction import StepPrediction
from .sheets import sheets_of


@dataclass(frozen=True)
class RehearsedPipeline:
    """One pipeline of the script.

    Attributes:
        plan: of its training steps.
        gpus: by device of the plan, the GPU.
        losses: of its steps, computed by CPU workers.
        fit: the predicted memory.
        orders: by way of copies, what the model of a driver has found.
        obstacles: reasons against a capture as CUDA graphs, waits of the host in actions among
            them.
        prediction: of times, or the reason for having none.
    """

    plan: Plan
    gpus: Sequence[int]
    losses: Sequence[float]
    fit: Fit
    orders: Mapping[str, Orders]
    obstacles: Sequence[str]
    prediction: StepPrediction | str

    @property
    def violations(self) -> list[str]:
        """All that the model of a driver objects to."""
        return [text for orders in self.orders.values() for text in orders.violations]


@dataclass(frozen=True)
class Rehearsal(WithTimelines):
    """The findings of a rehearsal. Its string has all tables.

    Attributes:
        box: the box.
        pipelines: of the script, in the order of their making.
        waits: how often the host would wait for a GPU, by place.
        shared: whether pipelines share parameters, so that their bytes do not add up.
    """

    command = "pykern rehearse"

    box: Box
    pipelines: Sequence[RehearsedPipeline]
    waits: Mapping[HostWait, int]
    shared: bool = False

    @property
    def passes(self) -> bool:
        """Whether no step is known not to fit, and no order is violated."""
        wrong = any(one.fit.fits is False or one.violations for one in self.pipelines)
        return not (wrong or self.too_full)

    @property
    def too_full(self) -> list[str]:
        """The GPUs that hold a step of each pipeline, and not all pipelines at once.

        Activations are those of one pipeline, since their steps follow each other.
        """
        kept: dict[int, float] = defaultdict(float)
        most: dict[int, float] = defaultdict(float)
        for one in self.pipelines:
            in_step: dict[int, float] = defaultdict(float)
            for gpu, held in zip(one.gpus, one.fit.devices, strict=False):
                kept[gpu] += held.total - held.activations
                in_step[gpu] += held.activations
            most.update({gpu: max(most[gpu], held) for gpu, held in in_step.items()})
        if self.shared or len(self.pipelines) < 2:
            return []
        has = {gpu: self.box.devices[gpu].memory_bytes or math.inf for gpu in kept}
        return [f"cuda:{gpu}" for gpu in sorted(kept) if kept[gpu] + most[gpu] > has[gpu]]

    def tables(self) -> list[Sheet]:
        """All tables, in their order."""
        return list(sheets_of(self))

    def timelines(self) -> dict[str, Timeline]:
        """The predicted timeline of a step of each pipeline whose times are known."""
        many = len(self.pipelines) > 1
        return {
            f"predicted, pipeline {number}" if many else "predicted": one.prediction.timeline
            for number, one in enumerate(self.pipelines)
            if not isinstance(one.prediction, str)
        }

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draws the timelines: see `WithTimelines`."""
        self._require_times("picture")
        super().save_picture(path)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes a Chrome trace: see `WithTimelines`."""
        self._require_times("trace")
        super().save_trace(path)

    def _require_times(self, name: str) -> None:
        if not self.timelines():
            raise ValueError(
                f"{name} must be of a step whose times are predicted, got none, since "
                f"{self._reasons[0]}. Leave it out"
            )

    @property
    def _reasons(self) -> list[str]:
        """The reasons for which times are not predicted, each once."""
        found = (one.prediction for one in self.pipelines)
        return list(dict.fromkeys(why for why in found if isinstance(why, str)))

    def summary(self) -> str:
        """The verdict, and what it rests on."""
        verdicts = " ".join(self._verdicts())
        return (
            f"{verdicts}\nComputed here, by CPU workers: losses. {self._basis()} Checked against "
            "the model of a driver: the order of copies and actions of a step. Not looked at: "
            "streams of the script's own, tensors of two devices in one operation, an allocator's "
            "reserve."
        )

    def _basis(self) -> str:
        told = []
        if any(one.fit.found is not None for one in self.pipelines):
            told.append("bytes, by shapes")
        if self.timelines():
            told.append(f"times, by the rates of {self.box.name} ({self.box.basis})")
        basis = f"Predicted: {'; '.join(told) or 'nothing'}."
        return " ".join([basis, *(f"Without times, since {why}." for why in self._reasons)])

    def _verdicts(self) -> Iterator[str]:
        for one in self.pipelines:
            if one.fit.fits is None:
                yield "Whether it fits is not known."
            elif one.fit.fits:
                yield "It fits."
            else:
                yield "It does not fit, so the script was ended before its first step."
                change = one.fit.change
                yield NOT_ENOUGH if change is None else f"It fits with {change}."
            if one.violations:
                yield f"Violations of order: {len(one.violations)}."
        if self.too_full:
            yield f"All pipelines together do not fit {', '.join(self.too_full)}."

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all of it as JSON; a loss that is not finite is null, as JSON has no word for it.

        Raises:
            OSError: the file cannot be written.
        """
        content = {
            "box": self.box.name,
            "passes": self.passes,
            "pipelines": [_as_data(one) for one in self.pipelines],
            "waits": [
                {**where.line._asdict(), "call": where.call, "action": where.action, "times": times}
                for where, times in self.waits.items()
            ],
        }
        write_text(Path(path), json.dumps(content, indent=2, allow_nan=False) + "\n")


def _as_data(one: RehearsedPipeline) -> dict[str, Any]:
    time = None if isinstance(one.prediction, str) else one.prediction
    devices = zip(one.gpus, one.fit.devices, strict=False)
    return {
        "losses": [loss if math.isfinite(loss) else None for loss in one.losses],
        "fits": one.fit.fits,
        "change": one.fit.change,
        "notes": list(one.fit.notes),
        "devices": [{"gpu": gpu, **asdict(held)} for gpu, held in devices],
        "violations": one.violations,
        "against_capture": list(one.obstacles),
        "not_predicted": one.prediction if time is None else None,
        "prediction": time
        and {
            "step_ns": time.step_ns,
            "makespan_ns": time.timeline.makespan_ns,
            "update_ns": time.update_ns,
            "bubble_ratio": time.timeline.bubble_ratio,
            "rows_per_s": time.rows_per_s,
            "tokens_per_s": time.tokens_per_s,
        },
    }
