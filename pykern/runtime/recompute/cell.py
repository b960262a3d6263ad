"""One microbatch of a recomputed stage between its F and its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels import seeds
from ...tensors.trees import tensors_of
from ...torch_private import top_hooks, version_of
from ...trace import Environment
from ..autograd.cut import Cut, cut
from ..random.compiled import Whole
from ..random.draws import repeat
from ..random.eager import Begins, OwnState
from .buffers import Buffers
from .watch import RecomputeSegment, without_saved_tensors_hooks

_NOTHING = nullcontext()

# The layers of a stage, then the end of its F, which returns the tensors that backward starts from.
# Each call gets the returned value of the call before.
Calls = Sequence[Callable[..., Any]]
# The shape and type of a tensor, or those of several.
One = tuple[torch.Size, torch.dtype]
Described = One | list[One]
# A microbatch whose graph R makes in one piece, by the layers alone, with nothing to restore: the
# argument, the number of writes to it if they are counted, and the outputs of F.
OneGraph = tuple[Tensor, int | None, Described]
# As `OneGraph`, for values of a recorded forward.
OneGraphOfValues = tuple[Environment, list[int], Described]


class Drawn(NamedTuple):
    """Such a microbatch whose F has drawn random numbers, and the states that they began at."""

    begins: Begins
    kept: OneGraph | OneGraphOfValues


def run(calls: Calls, arguments: tuple[Any, ...]) -> Any:
    """Runs calls one after another, the first with these arguments; returns the last result."""
    first, *others = calls
    value = first(*arguments)
    for call in others:
        value = call(value)
    return value


class Cell:
    """A microbatch of a stage between its F and its backward.

    Args:
        arguments: of the first call, as R will need them.
        segments: the calls.
        buffers: the buffers that F changes, as F finds them.
        by_layer: whether R makes only the last graph. The backward makes each other graph when the
            graph behind it is freed.

    Attributes:
        is_whole: whether the graph is in one piece, which F has kept or R has made.
    """

    def __init__(
        self,
        arguments: tuple[Any, ...],
        segments: Sequence[RecomputeSegment],
        buffers: Buffers,
        *,
        by_layer: bool,
    ) -> None:
        self._arguments = arguments
        self._writes = _writes_to(arguments)
        self._segments = segments
        self._buffers = buffers
        self._by_layer = by_layer
        self.is_whole = len(segments) == 1
        # By segment: the random states that it begins with, its position among provided seeds, the
        # cut at the end of its graph, and the shapes and types of its outputs.
        self._begins: list[Begins] = []
        self._seeds: list[int] = []
        self._cuts: list[Cut] = []
        self._outputs: list[Described] = []

    def forward(
        self, calls: Calls, arguments: tuple[Any, ...], state: OwnState | Whole | None
    ) -> None:
        """F, whose graph is freed piece by piece."""
        # Hooks of the caller are only for graphs that are kept.
        is_hooked = top_hooks() is not None
        for segment in self._segments:
            begins = {} if state is None else state.note()
            position = seeds.position()
            hooked = is_hooked and not segment.keeps
            with without_saved_tensors_hooks() if hooked else _NOTHING:
                value = _run_pieces(calls, segment, arguments)
            self.add(value, begins, position)
            del value
            arguments = (self._cuts[-1].value,)

    def add(self, value: Any, begins: Begins, position: int = 0) -> None:
        """Takes the returned value of the next segment in F."""
        segment = self._segments[len(self._cuts)]
        # The end returns the tensors that backward starts from, not a value.
        is_last = len(self._cuts) == len(self._segments) - 1
        behind = Cut(None, value, ()) if is_last else cut(value)
        self._outputs.append(described(behind.outputs))
        if not segment.keeps:
            behind.outputs = ()
        self._begins.append(begins)
        self._seeds.append(position)
        self._cuts.append(behind)

    def again(self, calls: Calls) -> Sequence[Tensor]:
        """R; returns the tensors that backward starts from."""
        # A stage without gradients has no backward.
        if not self._outputs[-1]:
            return ()
        if not self._by_layer:
            for number in range(len(self._cuts) - 1):
                self._make(number, calls)
        return self.outputs(calls)

    def outputs(self, calls: Calls) -> Sequence[Tensor]:
        """The outputs of the last segment's graph, which is made now if needed."""
        self._make(len(self._cuts) - 1, calls)
        return self._cuts[-1].outputs

    def front(self) -> Cut | None:
        """Removes the last segment; returns the cut in front of it, None for the first segment."""
        self._cuts.pop()
        return self._cuts[-1] if self._cuts else None

    def _make(self, number: int, calls: Calls) -> None:
        """Makes the graph of a segment, unless F or R has made it, and releases its input."""
        segment, behind = self._segments[number], self._cuts[number]
        if number == 0:
            arguments, self._arguments = self._arguments, ()
        else:
            before = self._cuts[number - 1]
            arguments, before.value = (before.value,), None
        if segment.keeps or behind.outputs:
            return
        if number == 0 and _writes_to(arguments) != self._writes:
            raise written()
        which = segment.calls
        if self._buffers.is_empty and not (self._begins[number] or seeds.are_provided()):
            value = run(calls[which.start : which.stop], arguments)
        else:
            again = seeds.again_from(self._seeds[number])
            with self._buffers.lent(), repeat(self._begins[number]), again:
                value = run(calls[which.start : which.stop], arguments)
        is_last = number == len(self._segments) - 1
        behind.outputs = value if is_last else cut(value).outputs
        if (now := described(behind.outputs)) != self._outputs[number]:
            raise another(segment.calls, now, self._outputs[number])


def _run_pieces(calls: Calls, segment: RecomputeSegment, arguments: tuple[Any, ...]) -> Any:
    """The result of a segment; only the last piece keeps its graph."""
    *pieces, last = segment.pieces
    for piece in pieces:
        value = run(calls[piece.start : piece.stop], arguments)
        arguments = (without_graph(value),)
        del value
    return run(calls[last.start : last.stop], arguments)


def without_graph(value: Any) -> Any:
    """The value as the beginning of a new graph."""
    if not isinstance(value, Tensor):
        return cut(value).value
    leaf = value.detach()
    return leaf.requires_grad_() if value.requires_grad else leaf


def _writes_to(arguments: tuple[Any, ...]) -> list[int]:
    """The number of writes to each tensor so far."""
    if len(arguments) == 1 and type(arguments[0]) is Tensor:
        return [version_of(arguments[0])]
    return [version_of(tensor) for tensor in tensors_of(arguments)]


def written() -> RuntimeError:
    """The error of arguments that were written after F, as by a loss that changes the batch."""
    return RuntimeError(
        "the batch must stay as it is until recompute has read it again, got a write to it "
        "after the forward. Write to a copy, or leave out recompute"
    )


def described(tensors: Sequence[Tensor]) -> Described:
    """The shapes and types of tensors."""
    if len(tensors) == 1:
        return tensors[0].shape, tensors[0].dtype
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def another(calls: range, again: Described, before: Described) -> RuntimeError:
    """The error of calls whose outputs differ from their outputs in F."""
    both = ([one] if isinstance(one, tuple) else one for one in (again, before))
    now, then = ([(tuple(shape), dtype) for shape, dtype in each] for each in both)
    return RuntimeError(
        f"calls {calls} of a stage returned {now} that require grad when they were "
        f"recomputed, and {then} before. Such layers cannot be recomputed: leave out recompute"
    )
