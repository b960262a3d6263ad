"""The inputs of actions from other stages, for timelines: a plan's own are in C++."""

from collections.abc import Iterator

from pykern._C import Action, Kind

GRADIENTS = (Kind.B, Kind.I)


def inputs(action: Action) -> Iterator[Action]:
    """The actions of other stages that an action waits for; the plan may lack some of them."""
    cell = action.microbatch, action.slice
    if action.kind is Kind.F and action.stage > 0:
        yield Action(Kind.F, action.stage - 1, *cell)
    if action.kind in GRADIENTS:
        for kind in GRADIENTS:
            yield Action(kind, action.stage + 1, *cell)
