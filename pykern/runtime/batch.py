"""The batch that a step runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from ..once import once
from ..tensors.trees import Call, flatten
from . import microbatch
from .loss import Losses
from .recompute.recompute import Level
from .stage.stage import Ends, Finish, Stage

_PLAIN = (int, float, str, type(None), Enum)

# Turns microbatches' arguments of the model into arguments of the first layer; None for a
# microbatch without rows.
Enter = Callable[[Sequence[Call | None]], Sequence[Call | None]]


def _as_they_are(calls: Sequence[Call | None]) -> Sequence[Call | None]:
    return calls


@dataclass(frozen=True)
class Batch:
    """A batch, and how a step runs the batch.

    Attributes:
        inputs: arguments of the model, positional and by name, for all rows.
        target: of the loss, for all rows; None for a loss without targets.
        rows: the number of rows of each microbatch.
        finish: called in the last stage with each microbatch and its output; returns where backward
            starts. `Losses` in a training step.
        levels: by stage and microbatch, the recompute level; None for a microbatch that is not
            recomputed, empty for a step without recompute.
        enter: turns the microbatches of `inputs` into positional arguments of the first layer, and
            keyword arguments for all layers whose forward names them.
        given: what the caller has given, which may be in pinned memory that copies still read.
    """

    inputs: Call
    target: Any
    rows: Sequence[int]
    finish: Losses | Finish
    levels: Sequence[Sequence[Level | None]] = ()
    enter: Enter = _as_they_are
    given: Any = ()

    @once
    def calls(self) -> Sequence[Call | None]:
        """The result of `enter` for each microbatch; None for a microbatch without rows."""
        parts = microbatch.split(self.inputs, self.rows)
        if 0 in self.rows:
            parts = [part if rows else None for part, rows in zip(parts, self.rows, strict=True)]
        return self.enter(parts)


def values_of(inputs: Call, target: Any = None) -> tuple[object, ...]:
    """The values, names and structures that a batch gives to layers and loss beside tensors.

    Empty without arguments, as for a stream, whose batches come later and are alike.
    """
    args, named = inputs
    if not (args or named):
        return ()
    given = *args, *named.values(), target
    if all([isinstance(one, Tensor) or one is None for one in given]):
        return *[one is None for one in given], *named
    leaves, spec = flatten((args, named, target))
    return *[_plain(leaf) for leaf in leaves], spec


def is_alike(stage: Stage, inputs: Call) -> bool:
    """Whether a batch has the values beside tensors that the last batch of a stage had.

    Whole numbers, such as a position or a length, are alike: they would have streams wait in turn.
    """
    return _but_numbers(values_of(inputs)) == _but_numbers(stage.values)


def _but_numbers(values: tuple[object, ...]) -> list[object]:
    return [int if isinstance(one, tuple) and one[0] is int else one for one in values]


def _plain(value: object) -> object:
    """The value with its type, as 1 and True are equal; the type of one that may not be equal."""
    return type(value), value if isinstance(value, _PLAIN) else None


class Outputs:
    """Takes the outputs of the last stage, and starts no backward.

    Args:
        weights: of the microbatches, for the sum of outputs without dimensions.

    Attributes:
        parts: the outputs, by microbatch.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self.parts: dict[int, Any] = {}

    def __call__(self, index: int, output: Any, _: bool) -> Ends:
        """Takes the output of a microbatch."""
        self.parts[index] = output
        return (), ()

    def merged(self) -> Any:
        """The output for the whole batch."""
        ran = sorted(self.parts)
        return microbatch.merge([self.parts[i] for i in ran], [self._weights[i] for i in ran])
