"""B of stages whose values skip stages, or that get such values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from ...torch_private import WHOLE
from ..autograd.failed import let_go
from ..autograd.landing import collect
from .backward import graph_by_graph
from .transport import TakeIn, Transport

if TYPE_CHECKING:
    from .stage import Run, Stage


def straight(stage: Stage, take_in: TakeIn | None = None) -> Run:
    """As `backward.straight`, with gradients from farther stages, and gradients for these."""
    outputs_of, gradients_of, leaves_of = stage.outputs, stage.gradients, stage.leaves
    run_backward, previous, parcels = stage.run_backward, stage.previous, stage.parcels
    answers, opened = parcels.answers, parcels.opened
    back = None if type(stage.transport) is Transport else stage.transport.back

    def backward(microbatch: int) -> None:
        outputs, gradients = outputs_of[microbatch], gradients_of[microbatch]
        if microbatch in answers:
            gradients = (*gradients, *answers.pop(microbatch))
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
            mine: Sequence[Tensor | None] = found
            if microbatch in opened:
                mine = parcels.answer(microbatch, found, back)
            previous.gradients[microbatch] = mine

    return backward
