"""F and R of microbatches whose graph R makes in one piece, by the layers alone.

Nothing is restored for them: no random numbers, no seeds, no buffers that F writes. The functions
call little, since a call takes as long as a few checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...torch_private.bare_calls import bare_calls
from ..recompute.cell import another, described, without_graph, written
from ..recompute.watch import Seen
from .hand_over import again

if TYPE_CHECKING:
    from .stage import Run, Stage

# Observations of a stage's layers, the calls in them, each with whether F cuts the graph behind
# it, and the latter by layer.
Ready = tuple[Seen, Sequence[tuple[Callable[..., Any], bool]], Sequence[bool]]


def forward(stage: Stage, compute: Run) -> Run:
    """F of such microbatches, as earlier steps have seen them; `compute` runs F of all others."""
    recomputed, arguments, hand_over = stage.recomputed, stage.arguments, stage.hand_over
    cells, levels = recomputed.cells, recomputed.levels
    originals, ready = stage.layers, _ready(stage)

    def forward(microbatch: int) -> None:
        given, found = arguments[microbatch], None
        if given is not None and len(given) == 1 and type(argument := given[0]) is Tensor:
            found = ready.get(argument.requires_grad)
        if found is None or levels[microbatch] != "stage":
            compute(microbatch)
            return
        arguments[microbatch] = None
        seen, calls, cuts = found
        if seen.has_buffers:
            loss_fn = getattr(stage.finish, "function", None)
            recomputed.look((argument.requires_grad,), seen, stage.layers, loss_fn)
        # Copies for ties, replicas and weight versions are set after F was composed.
        if stage.layers is not originals:
            calls = list(zip(stage.layers, cuts, strict=True))
        # Counted before the calls, which may write the argument in some forwards only.
        try:
            writes = argument._version
        except RuntimeError:
            # Nothing counts the writes to a tensor of inference mode.
            writes = None
        value: Any = argument
        for call, is_cut in calls:
            value = call(value)
            if is_cut:
                value = without_graph(value)
        outputs = hand_over(microbatch, value)
        if seen.has_buffers:
            recomputed.require_left_alone((argument.requires_grad,))
        one = len(outputs) == 1
        made = (outputs[0].shape, outputs[0].dtype) if one else described(outputs)
        cells[microbatch] = argument, writes, made

    return forward


def _ready(stage: Stage) -> dict[bool, Ready]:
    """All that F looks up for an argument alone, by whether it requires grad."""
    ready: dict[bool, Ready] = {}
    for (needs, *others), seen in stage.recomputed.seen.items():
        if not others and seen.is_bare:
            cuts = seen.cuts_behind(is_last=stage.next is None)
            calls: list[tuple[Callable[..., Any], bool]] = []
            for layer, is_cut in zip(stage.layers, cuts, strict=True):
                *inner, last = bare_calls([layer])
                calls += [*((call, False) for call in inner), (last, is_cut)]
            ready[needs] = seen, calls, cuts
    return ready


def recompute(stage: Stage, others: Run) -> Run:
    """R of such microbatches; `others` runs R of all others."""
    cells, outputs_of = stage.recomputed.cells, stage.outputs
    originals, is_last = stage.layers, stage.next is None
    calls = bare_calls(originals)

    def recompute(microbatch: int) -> None:
        kept: Any = cells.get(microbatch)
        if type(kept) is not tuple:
            others(microbatch)
            return
        value, writes, before = kept
        # The argument is let go with the first call, unless the graph holds it.
        del cells[microbatch], kept
        # A stage without gradients has no backward.
        if not before:
            return
        if writes is not None and writes != value._version:
            raise written()
        for call in calls if stage.layers is originals else stage.layers:
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
