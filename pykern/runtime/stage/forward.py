"""F: straight calls of the layers, and wrappers for the features that are in force.

A stage composes its F from these functions when it begins a step, and again if the features in
force change during the step. Each returns a function of a microbatch, which takes the arguments of
the first layer from `stage.arguments`; None marks a microbatch without rows, which is not run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ...tensors.trees import flatten, tensors_of, unflatten
from ...torch_private.bare_calls import BareCalls, bare_calls
from ...trace import Segment
from ...trace.segment import Runnable
from ..random.known import KnownState
from ..recompute.cell import Calls, run
from .in_place import look_at_copies, on_copies
from .keywords import by_name
from .skips import open_parcels
from .transport import Arrive

if TYPE_CHECKING:
    from .stage import Run, Stage


def straight(stage: Stage, arrive: Arrive | None = None) -> Run:
    """Calls layer after layer, and hands over the result of the last one."""
    if are_segments(stage.layers):
        return _segments(stage, arrive)
    arguments, outputs, hand_over = stage.arguments, stage.outputs, stage.hand_over
    # The layers are unpacked here, because unpacking takes as long as a call.
    layers = stage.layers
    first, *others = bare_calls(layers)

    def forward(microbatch: int) -> None:
        given = arguments[microbatch]
        if given is None:
            return
        arguments[microbatch] = None
        head, tail = first, others
        # Copies for ties, replicas and weight versions are set after F was composed.
        if stage.layers is not layers:
            head, *tail = bare_calls(stage.layers)
        value = head(*given)
        del given
        for layer in tail:
            value = layer(value)
        outputs[microbatch] = hand_over(microbatch, value)

    return forward


def are_segments(layers: Sequence[nn.Module]) -> bool:
    """Whether F runs these layers as segments, which open parcels themselves."""
    return all([isinstance(layer, Segment) for layer in layers])


def _segments(stage: Stage, arrive: Arrive | None) -> Run:
    """Runs all segments of a recorded forward in one go, and hands over the result.

    Values are taken out of the environment as they are used, which is this stage's alone.
    """
    arguments, outputs, hand_over = stage.arguments, stage.outputs, stage.hand_over
    layers = stage.layers
    # Filled by the first F, since most steps have straight code instead (`straight_tape`).
    parts: list[Runnable] = []
    come = stage.parcels.come

    def forward(microbatch: int) -> None:
        given = arguments[microbatch]
        if given is not None:
            arguments[microbatch] = None
            (env,) = given
            if microbatch in come:
                open_parcels(stage, microbatch, env, arrive)
            if not parts:
                parts.extend(bare_parts(layers))
            now = parts if stage.layers is layers else bare_parts(stage.layers)
            value, pieces = env, env.cut_tape.pieces
            for index, here_of, modules in now:
                value = pieces[index](env, here_of, modules)
            outputs[microbatch] = hand_over(microbatch, value)

    return forward


def bare_parts(layers: Sequence[nn.Module]) -> list[Runnable]:
    """The segments among layers, with the bare calls of their modules."""
    held = [layer.part() for layer in layers if isinstance(layer, Segment)]
    return [(index, here_of, BareCalls(calls)) for index, here_of, calls in held]


def by_calls(stage: Stage) -> Run:
    """Runs F call by call, where a feature wraps single calls."""

    def forward(microbatch: int) -> None:
        given = stage.arguments[microbatch]
        if given is not None:
            stage.arguments[microbatch] = None
            stage.outputs[microbatch] = run(calls_of(stage, microbatch, stage.hand_over), given)

    return forward


def calls_of(stage: Stage, microbatch: int, end: Callable[[int, Any], Any]) -> Calls:
    """The calls of F in order: the layers, then `end` with the result of the last layer."""
    keywords = stage.keywords[microbatch] if stage.keywords else None
    first, *others = by_name(stage, keywords) if keywords else stage.layers
    last: Callable[[Any], Any] = partial(end, microbatch)
    if stage.looks_at_copies:
        first, last = look_at_copies(stage, first, last)
    elif stage.copies_input:
        first = partial(on_copies, first)
    calls = [first, *others, last]
    return calls if stage.look is None else stage.look(microbatch, calls)


def with_parcels(stage: Stage, compute: Run, arrive: Arrive | None) -> Run:
    """Adds values from farther stages to the arguments from the previous stage."""

    def forward(microbatch: int) -> None:
        given = stage.arguments[microbatch]
        if microbatch in stage.parcels.come and given is not None:
            open_parcels(stage, microbatch, given[0], arrive)
        del given
        compute(microbatch)

    return forward


def keeping(stage: Stage, compute: Run) -> Run:
    """Moves inputs from the previous stage into memory that the stage may keep after the step."""

    def forward(microbatch: int) -> None:
        given = stage.arguments[microbatch]
        if given is not None:
            values, spec = flatten(given)
            come = tensors_of(values)
            taken = {
                id(tensor): mine
                for tensor, mine in zip(come, stage.transport.arrive(come), strict=True)
            }
            stage.arguments[microbatch] = unflatten([taken.get(id(v), v) for v in values], spec)
            stage.leaves[microbatch] = [taken[id(leaf)] for leaf in stage.leaves[microbatch]]
            del given, values, come, taken
        compute(microbatch)

    return forward


def drawing(stage: Stage, compute: Run, known: KnownState | None) -> Run:
    """Draws random numbers from the action's own state, until an F is seen not to draw.

    With `known`, nothing is left to see.
    """
    draws = stage.draws
    if known is not None:
        state_of, arguments = known.of, stage.arguments

        def known_forward(microbatch: int) -> None:
            if arguments[microbatch] is not None:
                with state_of(microbatch) as draws.state:
                    compute(microbatch)

        return known_forward

    def forward(microbatch: int) -> None:
        if stage.arguments[microbatch] is None:
            return
        with draws.forward(microbatch) as state:
            draws.state = state
            try:
                compute(microbatch)
            finally:
                draws.state = None
        if not draws.possible:
            stage.choose()

    return forward
