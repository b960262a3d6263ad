"""F and R of microbatches with recompute levels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...torch_private import top_hooks
from ..random.draws import repeat
from ..random.eager import KnownState, OwnState
from ..recompute.cell import Drawn
from . import one_graph, one_graph_of_values
from .forward import are_segments, calls_of

if TYPE_CHECKING:
    from .stage import Run, Stage


def at_levels(
    stage: Stage, compute: Run, known: KnownState | None, *, by_calls: bool
) -> tuple[Run, Run]:
    """F and R of a stage, at the recompute level of each microbatch.

    Args:
        stage: the stage.
        compute: runs F of microbatches without R.
        known: the modes of forwards, if they draw and nothing is left to watch.
        by_calls: whether a feature wraps single calls.
    """
    run, again = _forward(stage, compute), one_graph.recompute(stage)
    are_values = are_segments(stage.layers)
    if are_values:
        again = one_graph_of_values.recompute(stage, again)
    # The caller's hooks for saved tensors have to be restored, and draws that are watched.
    is_watched = stage.draws.possible and known is None
    if not stage.recomputed.by_stage or by_calls or is_watched or top_hooks() is not None:
        return run, again
    in_one = (one_graph_of_values if are_values else one_graph).forward(stage, run)
    if known is None:
        return in_one, again
    return _noting(stage, in_one, run), _repeating(stage, again)


def _noting(stage: Stage, in_one: Run, others: Run) -> Run:
    """Notes how the draws of F began, where `in_one` leaves one graph for R."""
    draws, cells = stage.draws, stage.recomputed.cells

    def forward(microbatch: int) -> None:
        state = draws.state
        # The first draw of a step takes its seed.
        if not isinstance(state, OwnState) or state.generator is None:
            others(microbatch)
            return
        begins = state.begins()
        in_one(microbatch)
        kept: Any = cells.get(microbatch)
        if type(kept) is tuple:
            cells[microbatch] = Drawn(begins, kept)

    return forward


def _repeating(stage: Stage, again: Run) -> Run:
    """Repeats the draws of F in R."""
    cells = stage.recomputed.cells

    def recompute(microbatch: int) -> None:
        kept = cells.get(microbatch)
        if type(kept) is not Drawn:
            again(microbatch)
            return
        begins, cells[microbatch] = kept
        with repeat(begins):
            again(microbatch)

    return recompute


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
