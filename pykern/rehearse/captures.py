"""Reasons why a step would not be captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from ..plan import Plan
from ..runtime.batch import Batch
from ..runtime.gpu.capture.refusals import (
    CannotCapture,
    refuse_batch,
    refuse_loss,
    refuse_plan,
    refuse_stage,
)
from ..runtime.stage.stage import Stage


def against_capture(plan: Plan, stages: Sequence[Stage], batch: Batch) -> Iterator[str]:
    """The reasons to refuse a capture of this step, which has run; one for each stage."""
    checks: list[Callable[[], None]] = [
        partial(refuse_plan, plan),
        *(partial(refuse_stage, stage) for stage in stages),
        partial(refuse_loss, batch),
        partial(refuse_batch, batch),
    ]
    for check in checks:
        try:
            check()
        except CannotCapture as error:
            yield str(error)
