"""F and R of microbatches with recompute levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...torch_private import top_hooks
from . import one_graph, one_graph_of_values
from .forward import are_segments, calls_of

if TYPE_CHECKING:
    from .stage import Run, Stage


def at_levels(stage: Stage, compute: Run, *, by_calls: bool) -> tuple[Run, Run]:
    """F and R of a stage, at the recompute level of each microbatch.

    Args:
        stage: the stage.
        compute: runs F of microbatches without R.
        by_calls: whether a feature wraps single calls.
    """
    run, again = _forward(stage, compute), one_graph.recompute(stage)
    # Draws, and the caller's hooks for saved tensors, have to be restored.
    restores = by_calls or stage.draws.possible or top_hooks() is not None
    bare = stage.recomputed.by_stage and not restores
    if not are_segments(stage.layers):
        return one_graph.forward(stage, run) if bare else run, again
    again = one_graph_of_values.recompute(stage, again)
    return one_graph_of_values.forward(stage, run) if bare else run, again


def _forward(stage: Stage, compute: Run) -> Run:
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
