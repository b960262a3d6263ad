"""B and I: one call of autograd for a stage with one graph, graph by graph for all others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from ...modes import both
from ...plan import Kind
from ...torch_private import WHOLE
from ..autograd.failed import let_go
from ..autograd.landing import Through, collect, landed
from ..autograd.split import Work, backward_to_inputs
from .forward import calls_of
from .hand_over import again
from .transport import Back, TakeIn

if TYPE_CHECKING:
    from .stage import Run, Stage


def straight(stage: Stage, take_in: TakeIn | None = None) -> Run:
    """B of one graph, all of whose outputs have a gradient.

    `take_in` moves gradients from later stages into memory that B may keep, if they are elsewhere.
    `WHOLE` tells torch's engine to go through the whole graph and to free it.
    """
    outputs_of, gradients_of, leaves_of = stage.outputs, stage.gradients, stage.leaves
    run_backward, previous = stage.run_backward, stage.previous

    def backward(microbatch: int) -> None:
        outputs, gradients = outputs_of[microbatch], gradients_of[microbatch]
        if take_in is not None and outputs and all([one is not None for one in gradients]):
            gradients = tuple(take_in(gradients))
        outputs_of[microbatch] = gradients_of[microbatch] = ()
        try:
            found = collect(run_backward, WHOLE, outputs, gradients, leaves_of[microbatch])
        except BaseException:
            let_go()
            raise
        if found is None:
            outputs_of[microbatch], gradients_of[microbatch] = outputs, gradients
            graph_by_graph(stage, microbatch)
        elif previous is not None:
            leaves_of[microbatch] = ()
            previous.gradients[microbatch] = found

    return backward


def giving_back(stage: Stage, run: Run) -> Run:
    """Sends the gradients for the previous stage there after B."""
    previous, maker, back = stage.previous, stage.index - 1, stage.transport.back
    assert previous is not None

    def backward(microbatch: int) -> None:
        run(microbatch)
        found = previous.gradients[microbatch]
        previous.gradients[microbatch] = back(microbatch, maker, found)

    return backward


def with_parcels(stage: Stage, run: Run, back: Back | None) -> Run:
    """Adds gradients from farther stages before B, and sends gradients to farther stages after.

    `back` moves these, if they have to move.
    """
    parcels, previous = stage.parcels, stage.previous
    answers, opened, gradients = parcels.answers, parcels.opened, stage.gradients

    def backward(microbatch: int) -> None:
        if microbatch in answers:
            gradients[microbatch] = (*gradients[microbatch], *answers.pop(microbatch))
        run(microbatch)
        if microbatch in opened:
            assert previous is not None
            found = parcels.answer(microbatch, previous.gradients[microbatch], back)
            previous.gradients[microbatch] = found

    return backward


def in_one_segment(stage: Stage, run: Run) -> Run:
    """B of microbatches with levels: straight if R has rebuilt the whole graph."""
    recomputed, cells = stage.recomputed, stage.recomputed.cells

    def backward(microbatch: int) -> None:
        in_parts = microbatch in cells and not recomputed.take_whole(microbatch)
        if in_parts or (recomputed.in_kernels and recomputed.keeps(microbatch)):
            graph_by_graph(stage, microbatch)
        else:
            run(microbatch)

    return backward


def watched(stage: Stage, run: Run) -> Run:
    """B with a watch for random draws, as long as B may draw."""
    leaves, safe = stage.leaves, stage.draws.safe(Kind.B)

    def backward(microbatch: int) -> None:
        if (0, len(leaves[microbatch])) in safe:
            run(microbatch)
        else:
            graph_by_graph(stage, microbatch)

    return backward


def graph_by_graph(stage: Stage, microbatch: int) -> None:
    """B of a stage whose graph may be in parts, with any outputs and leaves."""
    number = 0

    def through(
        outputs: Sequence[Tensor], gradients: Sequence[Tensor], _: Sequence[Tensor]
    ) -> None:
        nonlocal number
        with _around(stage, Kind.B, microbatch, number):
            stage.run_backward(tuple(outputs), tuple(gradients), *WHOLE)
        number += 1

    _run(stage, microbatch, through)


def to_inputs(stage: Stage, microbatch: int, finish_earlier: Work) -> list[Work]:
    """Runs I; returns the remaining work for W."""
    works: list[Work] = []
    number = 0

    def through(
        outputs: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> None:
        nonlocal number
        with _around(stage, Kind.I, microbatch, number):
            work = backward_to_inputs(
                outputs, gradients, leaves, finish_earlier, stage.run_backward
            )
        number += 1
        if work is not None:
            works.append(work)

    _run(stage, microbatch, through)
    if stage.previous is not None:
        found = stage.previous.gradients[microbatch]
        given = stage.transport.back(microbatch, stage.index - 1, found)
        stage.previous.gradients[microbatch] = given
    return works


def weights(stage: Stage, microbatch: int, works: list[Work]) -> None:
    """W: runs the work that I has left, and frees each part when it is done."""
    try:
        with _around(stage, Kind.W, microbatch, 0):
            while works:
                works.pop(0)()
    except BaseException:
        let_go()
        raise


def _around(
    stage: Stage, kind: Kind, microbatch: int, number: int
) -> AbstractContextManager[object]:
    """A context for one graph of a backward, which must not draw: see `Draws.backward`.

    The recompute level of F also holds here, since a layer's own checkpointing repeats F within.
    """
    mode = stage.draws.backward(kind, microbatch, (number, len(stage.leaves[microbatch])))
    if stage.look_back is not None:
        mode = both(stage.look_back(microbatch), mode)
    if not stage.recomputed.keeps(microbatch):
        return mode
    return both(mode, stage.recomputed.keeping(microbatch))


def _run(stage: Stage, microbatch: int, through: Through) -> None:
    """Runs a backward: of one graph, or of the graphs of the stage's segments, last first.

    Each graph is freed before the next one begins; at level `layer` the next graph is made then. At
    the end, the gradients for the previous stage are found, and not yet sent.
    """
    given, parcels = stage.gradients[microbatch], stage.parcels
    if microbatch in parcels.answers:
        given = (*given, *parcels.answers.pop(microbatch))
    outputs, gradients = _used(stage.outputs[microbatch], stage.transport.take_in(given))
    stage.outputs[microbatch] = stage.gradients[microbatch] = ()
    del given
    cell = stage.recomputed.take(microbatch)
    front = None if cell is None else cell.front()
    while cell is not None and front is not None and outputs:
        found = landed(front.leaves, through, outputs, gradients)
        outputs = ()
        if any(gradient is not None for gradient in found):
            made = cell.outputs(calls_of(stage, microbatch, partial(again, stage)))
            outputs, gradients = _used(made, found)
            del made
        front = cell.front()
    found = landed(stage.leaves[microbatch], through, outputs, gradients)
    if stage.previous is not None:
        stage.leaves[microbatch] = ()
        if microbatch in parcels.opened:
            found = parcels.answer(microbatch, found, stage.transport.back)
        stage.previous.gradients[microbatch] = found


def _used(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The outputs that have gradients, and their gradients."""
    used = [gradient for gradient in gradients if gradient is not None]
    if len(used) < len(gradients):
        pairs = zip(outputs, gradients, strict=True)
        outputs = [output for output, gradient in pairs if gradient is not None]
    return outputs, used
