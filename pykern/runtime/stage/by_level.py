"""F of microbatches with recompute levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .forward import calls_of

if TYPE_CHECKING:
    from .stage import Run, Stage


def at_levels(stage: Stage, compute: Run) -> Run:
    """Runs F at the recompute level of each microbatch."""

    def forward(microbatch: int) -> None:
        recomputed = stage.recomputed
        if not recomputed.has(microbatch):
            with recomputed.keeping(microbatch):
                compute(microbatch)
            return
        given = stage.arguments[microbatch]
        if given is not None:
            stage.arguments[microbatch] = None
            calls = calls_of(stage, microbatch, stage.hand_over)
            loss_fn = getattr(stage.finish, "function", None)
            recomputed.forward(microbatch, calls, given, stage.layers, loss_fn, stage.draws.state)

    return forward
