"""Notes the tensors that cross between stages, so that the first difference can be found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..plan import Kind
from ..runtime.stage.stage import Run, Stage
from ..tensors.trees import map_tree, tensors_of
from ..trace.routes import BATCH
from .compare import Bounds, compare

# By the stage that values enter, or gradients leave, and the microbatch.
BoundaryTensors = dict[tuple[int, int], Sequence[Tensor | None]]


class RunTensors:
    """The tensors that cross boundaries in one run: activations as they enter, and gradients.

    Attributes:
        forward: by stage that they enter.
        backward: by stage that they leave.
    """

    def __init__(self) -> None:
        self.forward: BoundaryTensors = {}
        self.backward: BoundaryTensors = {}

    def entering(self, stage: int, number: int, trees: list[Any]) -> list[Any]:
        """Notes the tensors that enter a stage in the plain model, and their gradients."""
        tensors = [tensor for tree in trees for tensor in tensors_of(tree)]
        self.forward[stage, number] = _copies(tensors)
        # A tensor that passes through a stage unchanged has a gradient of its own at each boundary.
        stand_ins = {id(one): torch.ops.aten.alias(one) for one in tensors}
        training = [stand_ins[id(one)] for one in tensors if one.requires_grad]
        self.backward[stage, number] = _gradients_of(training)
        return [map_tree(lambda leaf: stand_ins.get(id(leaf), leaf), tree) for tree in trees]


class Boundaries:
    """Notes the tensors at the stage boundaries of the pipeline while `seen` is set.

    Attributes:
        seen: collects the tensors; None to collect nothing.
    """

    def __init__(self) -> None:
        self.seen: RunTensors | None = None

    def stop(self) -> None:
        """Looks no more."""
        self.seen = None

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """The replacement for the call of an action."""
        if stage.previous is None:
            return call
        if kind is Kind.F:
            return partial(self._forward, stage, call)
        if kind in (Kind.B, Kind.I):
            return partial(self._backward, stage, call)
        return call

    def _forward(self, stage: Stage, call: Run, microbatch: int) -> None:
        arguments = stage.arguments[microbatch]
        if self.seen is not None and arguments is not None:
            trees = [arguments, *_parcels(stage, microbatch)]
            tensors = [tensor for tree in trees for tensor in tensors_of(tree)]
            self.seen.forward[stage.index, microbatch] = _copies(tensors)
        call(microbatch)

    def _backward(self, stage: Stage, call: Run, microbatch: int) -> None:
        if self.seen is not None:
            gradients = _gradients_of(stage.leaves[microbatch])
            self.seen.backward[stage.index, microbatch] = gradients
        call(microbatch)


def first_difference(
    ours: RunTensors, plain: RunTensors, num_stages: int, bounds: Bounds
) -> tuple[tuple[int, int], int, str] | None:
    """The first boundary behind which something differs, in the order of the computation.

    Returns:
        The two stages in the direction of what crosses, the microbatch, and how it differs; None
        where all boundaries agree.
    """
    forward = [((stage - 1, stage), stage) for stage in range(1, num_stages)]
    backward = [((stage, stage - 1), stage) for stage in reversed(range(1, num_stages))]
    for mine, theirs, boundaries in (
        (ours.forward, plain.forward, forward),
        (ours.backward, plain.backward, backward),
    ):
        for boundary, stage in boundaries:
            for number in sorted(n for s, n in theirs if s == stage):
                how = _how(mine.get((stage, number), ()), theirs[stage, number], bounds)
                if how is not None:
                    return boundary, number, how
    return None


def _how(
    ours: Sequence[Tensor | None], plain: Sequence[Tensor | None], bounds: Bounds
) -> str | None:
    if len(ours) != len(plain):
        return f"{len(ours)} tensors cross, plain {len(plain)}"
    for one, two in zip(ours, plain, strict=True):
        found = compare("", "", one, two, bounds)
        if found is not None:
            return found.how
    return None


def _parcels(stage: Stage, microbatch: int) -> Iterator[list[Tensor]]:
    """The tensors that have come past the previous stage."""
    for sender, values, _ in stage.parcels.come.get(microbatch, ()):
        if sender != BATCH:
            yield list(values.values())


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors]


def _gradients_of(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of tensors, which a backward fills in."""
    gradients: list[Tensor | None] = [None] * len(tensors)
    for place, tensor in enumerate(tensors):
        tensor.register_hook(partial(_note, gradients, place))
    return gradients


def _note(gradients: list[Tensor | None], place: int, gradient: Tensor) -> None:
    gradients[place] = gradient.detach().clone()
