"""F and R of microbatches with recompute levels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ...torch_private.bare_calls import bare
from ..recompute.cell import OneGraph, without_graph
from .forward import calls_of
from .hand_over import again

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


def in_one_graph(stage: Stage, compute: Run) -> Run:
    """Runs F of microbatches that R repeats by the layers alone; `compute` runs all others."""
    recomputed, arguments, hand_over = stage.recomputed, stage.arguments, stage.hand_over
    originals = stage.layers
    calls = [bare(layer) for layer in originals]
    recomputed.calls = originals, calls
    # A hand-over to the next stage cuts the graph behind the last layer.
    num_cuts = len(stage.layers) - (stage.next is not None)

    def forward(microbatch: int) -> None:
        given = arguments[microbatch]
        layers, loss_fn = stage.layers, getattr(stage.finish, "function", None)
        whole = None if given is None else recomputed.whole(microbatch, given, layers, loss_fn)
        if given is None or whole is None:
            compute(microbatch)
            return
        arguments[microbatch] = None
        (argument,) = given
        value = argument
        # Copies for ties, replicas and weight versions are set after F was composed.
        called = calls if layers is originals else layers
        for piece in whole.pieces:
            for call in called[piece.start : piece.stop]:
                value = call(value)
            if piece.stop <= num_cuts:
                value = without_graph(value)
        cell = OneGraph(argument, whole, hand_over(microbatch, value))
        if recomputed.left_alone is not None:
            recomputed.require_left_alone((argument.requires_grad,))
        recomputed.cells[microbatch] = cell

    return forward


def recompute(stage: Stage, microbatch: int) -> Sequence[Tensor]:
    """R: the tensors that backward starts from, with the graph that F has not kept."""
    cell = stage.recomputed.cells.get(microbatch)
    if cell is None:
        return ()
    if isinstance(cell, OneGraph):
        value = cell.take()
        if value is None:
            return ()
        layers, calls = stage.recomputed.calls
        for call in calls if stage.layers is layers else stage.layers:
            value = call(value)
        outputs = again(stage, microbatch, value)
        cell.require_same(outputs)
        return outputs
    calls = calls_of(stage, microbatch, partial(again, stage))
    return cell.again(calls)
