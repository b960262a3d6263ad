"""F and R of microbatches whose graph R makes in one piece, by the layers alone.

Nothing is restored for them: no random numbers, no seeds, no buffers that F writes. The functions
call little, since a call takes as long as a few checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...torch_private.bare_calls import bare
from ..recompute.cell import Calls, another, described, without_graph, written
from .forward import calls_of
from .hand_over import again

if TYPE_CHECKING:
    from .stage import Run, Stage


def forward(stage: Stage, compute: Run) -> Run:
    """F of such microbatches; `compute` runs F of all others."""
    recomputed, arguments, hand_over = stage.recomputed, stage.arguments, stage.hand_over
    cells, levels, seen_of = recomputed.cells, recomputed.levels, recomputed.seen
    originals, is_last = stage.layers, stage.next is None
    *bare_calls, bare_last = [bare(layer) for layer in originals]

    def forward(microbatch: int) -> None:
        given, seen = arguments[microbatch], None
        if given is not None and len(given) == 1 and type(argument := given[0]) is Tensor:
            seen = seen_of.get((argument.requires_grad,))
        if seen is None or not seen.is_bare or levels[microbatch] != "stage":
            compute(microbatch)
            return
        arguments[microbatch] = None
        if seen.has_buffers:
            loss_fn = getattr(stage.finish, "function", None)
            recomputed.look((argument.requires_grad,), seen, stage.layers, loss_fn)
        calls: Calls = bare_calls
        last: Callable[..., Any] = bare_last
        # Copies for ties, replicas and weight versions are set after F was composed.
        if stage.layers is not originals:
            calls, last = stage.layers[:-1], stage.layers[-1]
        value: Any = argument
        for call, can_cut in zip(calls, seen.can_cut, strict=False):
            value = call(value)
            if can_cut:
                value = without_graph(value)
        value = last(value)
        # A hand-over to the next stage cuts the graph behind the last layer.
        if is_last and seen.can_cut[-1]:
            value = without_graph(value)
        outputs = hand_over(microbatch, value)
        if seen.has_buffers:
            recomputed.require_left_alone((argument.requires_grad,))
        # As `version_of`. A tensor of inference mode requires no grad.
        counts = argument.requires_grad or not argument.is_inference()
        writes = argument._version if counts else 0
        one = len(outputs) == 1
        made = (outputs[0].shape, outputs[0].dtype) if one else described(outputs)
        cells[microbatch] = argument, writes, made

    return forward


def recompute(stage: Stage) -> Run:
    """R of a stage: of such microbatches, and of all others.

    An R may come from before a choice within a step, and its F from after it.
    """
    cells, outputs_of = stage.recomputed.cells, stage.outputs
    originals, is_last = stage.layers, stage.next is None
    bare_calls = [bare(layer) for layer in originals]

    def recompute(microbatch: int) -> None:
        kept = cells.get(microbatch)
        if not isinstance(kept, tuple):
            if kept is not None:
                calls = calls_of(stage, microbatch, partial(again, stage))
                outputs_of[microbatch] = kept.again(calls)
            return
        del cells[microbatch]
        value, writes, before = kept
        # The argument is let go with the first call, unless the graph holds it.
        del kept
        # A stage without gradients has no backward.
        if not before:
            return
        counts = value.requires_grad or not value.is_inference()
        if writes != (value._version if counts else 0):
            raise written()
        for call in bare_calls if stage.layers is originals else stage.layers:
            value = call(value)
        if is_last or type(value) is not Tensor:
            outputs: Sequence[Tensor] = again(stage, microbatch, value)
        else:
            outputs = (value,) if value.requires_grad else ()
        one = len(outputs) == 1
        now = (outputs[0].shape, outputs[0].dtype) if one else described(outputs)
        if now != before:
            raise another(range(len(originals) + 1), now, before)
        outputs_of[microbatch] = outputs

    return recompute
