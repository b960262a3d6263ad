"""F and R as in `one_graph`, for stages of a recorded forward, whose arguments are its values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...torch_private import version_of
from ...trace import Environment
from ..recompute.cell import another, described, without_graph, written
from ..recompute.watch import Seen
from .forward import bare_parts
from .hand_over import again

if TYPE_CHECKING:
    from .stage import Run, Stage

# Observations of a stage's segments, and for each segment whether F cuts the graph behind it.
SeenCuts = tuple[Seen, Sequence[bool]]


def forward(stage: Stage, compute: Run) -> Run:
    """F of such microbatches, as earlier steps have seen them; `compute` runs F of all others."""
    recomputed, arguments, hand_over = stage.recomputed, stage.arguments, stage.hand_over
    cells, levels = recomputed.cells, recomputed.levels
    layers, parts = stage.layers, bare_parts(stage.layers)
    # By which of the values require grad.
    ready: dict[tuple[bool, ...], SeenCuts] = {
        needs: (seen, seen.cuts_behind(is_last=stage.next is None))
        for needs, seen in recomputed.seen.items()
        if seen.is_bare
    }

    def forward(microbatch: int) -> None:
        given = arguments[microbatch]
        if given is None or levels[microbatch] != "stage":
            compute(microbatch)
            return
        env: Environment = given[0]
        values = env.values.values()
        needs = tuple([value.requires_grad for value in values])
        found = ready.get(needs)
        if found is None:
            compute(microbatch)
            return
        arguments[microbatch] = None
        seen, cuts = found
        if seen.has_buffers:
            recomputed.look(needs, seen, stage.layers, getattr(stage.finish, "function", None))
        writes = _writes_to(values)
        # Segments take values out of their environment.
        value: Any = Environment(env.cut_tape, env.values.copy())
        pieces = env.cut_tape.pieces
        # Copies for ties, replicas and weight versions are set after F was composed.
        now = parts if stage.layers is layers else bare_parts(stage.layers)
        for (index, here_of, modules), is_cut in zip(now, cuts, strict=True):
            value = pieces[index](value, here_of, modules)
            if is_cut:
                value = _cut(value)
        outputs = hand_over(microbatch, value)
        if seen.has_buffers:
            recomputed.require_left_alone(needs)
        cells[microbatch] = env, writes, described(outputs)

    return forward


def _writes_to(values: Iterable[Tensor]) -> list[int]:
    """The number of writes to each value so far."""
    try:
        return [value._version for value in values]
    except RuntimeError:
        # Nothing counts the writes to a tensor of inference mode.
        return [version_of(value) for value in values]


def _cut(value: Any) -> Any:
    """As `without_graph`, in less time for values, which change in place."""
    if type(value) is not Environment:
        return without_graph(value)
    leaves: dict[int, Tensor] = {}
    values = value.values
    for number, before in values.items():
        # A tensor that occurs twice stays one tensor.
        leaf = leaves.get(id(before))
        if leaf is None:
            leaf = leaves[id(before)] = before.detach()
            if before.requires_grad:
                leaf.requires_grad_()
        values[number] = leaf
    return value


def recompute(stage: Stage, others: Run) -> Run:
    """R of such microbatches; `others` runs R of all others."""
    cells, outputs_of = stage.recomputed.cells, stage.outputs
    layers, parts = stage.layers, bare_parts(stage.layers)

    def recompute(microbatch: int) -> None:
        kept: Any = cells.get(microbatch)
        if type(kept) is not tuple:
            others(microbatch)
            return
        value, writes, before = kept
        del cells[microbatch], kept
        # A stage without gradients has no backward.
        if not before:
            return
        if writes != _writes_to(value.values.values()):
            raise written()
        pieces = value.cut_tape.pieces
        now_parts = parts if stage.layers is layers else bare_parts(stage.layers)
        for index, here_of, modules in now_parts:
            value = pieces[index](value, here_of, modules)
        outputs = again(stage, microbatch, value)
        if (now := described(outputs)) != before:
            raise another(range(len(layers) + 1), now, before)
        outputs_of[microbatch] = outputs

    return recompute
