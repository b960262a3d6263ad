"""F: straight where nothing but the layers is in force, and what it is where something else is.

A stage chooses among these when it begins a step, and where what is in force changes meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ...trace import Environment
from ..autograd.cut import copies
from ..recompute.recompute import Calls, run

if TYPE_CHECKING:
    from .stage import Stage

# Gets a stage, a microbatch, and what the first layer is called with.
Compute = Callable[["Stage", int, tuple[Any, ...]], None]


def straight(stage: Stage, microbatch: int, arguments: tuple[Any, ...]) -> None:
    """Calls layer after layer, and hands over what the last one returns."""
    first, *others = stage.layers
    value = first(*arguments)
    for layer in others:
        value = layer(value)
    stage.outputs[microbatch] = stage.hand_over(stage, microbatch, value)


def by_calls(stage: Stage, microbatch: int, arguments: tuple[Any, ...]) -> None:
    """The same where something has to be done at single calls."""
    calls = calls_of(stage, microbatch, stage.hand_over)
    stage.outputs[microbatch] = run(calls, arguments)


def calls_of(stage: Stage, microbatch: int, end: Callable[[Stage, int, Any], Any]) -> Calls:
    """What F calls, one after another: the layers, then `end` with what the last returns."""
    keywords = stage.keywords[microbatch] if stage.keywords else None
    first, *others = _by_name(stage, keywords) if keywords else stage.layers
    if stage.copies_input:
        first = partial(_on_copies, first)
    calls = [first, *others, partial(end, stage, microbatch)]
    return calls if stage.look is None else stage.look(microbatch, calls)


def _by_name(stage: Stage, keywords: dict[str, Any]) -> list[Callable[..., Any]]:
    """The layers, each with those arguments that its forward names."""
    layers = zip(stage.layers, stage.keywords_of, strict=True)
    return [
        partial(layer, **{name: value for name, value in keywords.items() if name in names})
        for layer, names in layers
    ]


def _on_copies(layer: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return layer(*copies(arguments), **named)


def with_parcels(compute: Compute) -> Compute:
    """Adds what has come from farther stages to what the previous stage has given."""

    def opening(stage: Stage, microbatch: int, arguments: tuple[Any, ...]) -> None:
        if stage.parcels.come:
            values, leaves = stage.parcels.open(microbatch, stage.transport)
            stage.leaves[microbatch] = (*stage.leaves[microbatch], *leaves)
            near: Environment = arguments[0]
            arguments = (Environment(near.cut_tape, {**near.values, **values}),)
        compute(stage, microbatch, arguments)

    return opening


def at_levels(compute: Compute) -> Compute:
    """Keeps of each microbatch what its level says."""

    def keeping(stage: Stage, microbatch: int, arguments: tuple[Any, ...]) -> None:
        recomputed = stage.recomputed
        if recomputed.has(microbatch):
            calls = calls_of(stage, microbatch, stage.hand_over)
            holders = [*stage.layers, getattr(stage.finish, "function", None)]
            recomputed.forward(microbatch, calls, arguments, holders, stage.draws.state)
        else:
            with recomputed.keeping(microbatch):
                compute(stage, microbatch, arguments)

    return keeping


def drawing(compute: Compute) -> Compute:
    """Draws random numbers from a state of the action's own, until nothing is seen to draw."""

    def in_own_state(stage: Stage, microbatch: int, arguments: tuple[Any, ...]) -> None:
        draws = stage.draws
        with draws.forward(microbatch) as state:
            draws.state = state
            try:
                compute(stage, microbatch, arguments)
            finally:
                draws.state = None
        if not draws.possible:
            stage.choose()

    return in_own_state
