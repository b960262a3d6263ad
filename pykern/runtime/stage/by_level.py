"""F and R of microbatches with recompute levels."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ...torch_private import top_hooks
from ..random.draws import repeat
from ..random.eager import OwnState
from ..random.known import KnownState
from ..recompute.cell import Cell, Drawn
from . import one_graph, one_graph_of_values
from .forward import are_segments, calls_of
from .hand_over import again

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
    run, others = _forward(stage, compute), _recompute(stage)
    if not stage.recomputed.by_stage:
        return run, others
    # The caller's hooks for saved tensors have to be restored, and draws that are watched.
    is_watched = stage.draws.possible and known is None
    in_one = not (by_calls or is_watched or top_hooks() is not None)
    if are_segments(stage.layers):
        recompute = one_graph_of_values.recompute(stage, others)
        bare = one_graph_of_values.forward(stage, run) if in_one else run
    else:
        recompute = one_graph.recompute(stage, others)
        bare = one_graph.forward(stage, run) if in_one else run
    return bare if known is None or bare is run else _noting(stage, bare, run), recompute


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


def _recompute(stage: Stage) -> Run:
    """R of microbatches whose F has drawn, and of those with several graphs.

    An R may come from before a choice within a step, and its F from after it.
    """
    cells = stage.recomputed.cells

    def recompute(microbatch: int) -> None:
        kept = cells.get(microbatch)
        if isinstance(kept, Drawn):
            begins, cells[microbatch] = kept
            with repeat(begins):
                stage.bare_recompute(microbatch)
        elif isinstance(kept, Cell):
            calls = calls_of(stage, microbatch, partial(again, stage))
            stage.outputs[microbatch] = kept.again(calls)

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
