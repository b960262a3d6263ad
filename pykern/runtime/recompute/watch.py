"""Watches a forward of a stage, to find where it can be cut, and what it changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from ... import _C
from ...tensors.trees import tensors_of
from ...torch_private import pop_hooks, push_hooks, top_hooks, version_of
from ..autograd.cut import hidden_in
from ..autograd.graph import saved_by
from .buffers import Names, names_in
from .reads import Reads, Unread, memory_kept_by, memory_of

Edge = tuple[Node, int]


@dataclass(frozen=True, slots=True)
class RecomputeSegment:
    """Consecutive calls of a stage, whose graph is made and freed as one.

    Attributes:
        pieces: the numbers of the calls, in ranges between which the graph can be cut.
        keeps: whether the graph of F is kept, because one of the calls recomputes by itself.
    """

    pieces: tuple[range, ...]
    keeps: bool

    @property
    def calls(self) -> range:
        """The numbers of all its calls."""
        return range(self.pieces[0].start, self.pieces[-1].stop)


@dataclass(frozen=True)
class Seen:
    """Observations of a stage's calls, which are its layers and then the end of its F.

    Attributes:
        can_cut: for each call but the last, whether the graph can be cut behind it.
        keeps: for each call, whether it recomputes by itself, as activation checkpointing does.
        changed: the buffers that F changes.
        left_alone: the other buffers, which R reads as they are.
        overwrites: whether a layer writes into the stage's arguments.
        trains: the leaves that collect gradients in a backward, except the stage's arguments.
            References are weak, because replicas have other parameters in each step.
    """

    can_cut: Sequence[bool]
    keeps: Sequence[bool]
    changed: Names
    left_alone: Names
    overwrites: bool
    trains: Sequence[weakref.ref[Tensor]]

    def with_changed(self, written: Names) -> Seen:
        """The observations, with all buffers of modules whose buffers F has been found to write."""
        writers = {number for number, _ in written}
        also = [name for name in self.left_alone if name[0] in writers]
        left = [name for name in self.left_alone if name[0] not in writers]
        return replace(self, changed=[*self.changed, *also], left_alone=left)

    @cached_property
    def has_buffers(self) -> bool:
        """Whether there are any buffers."""
        return len(self.changed) + len(self.left_alone) > 0

    @cached_property
    def by_stage(self) -> list[RecomputeSegment]:
        """The calls in segments that are as long as possible."""
        return self._segments(by_layer=False)

    @cached_property
    def by_layer(self) -> list[RecomputeSegment]:
        """The calls in segments, one for each layer where possible."""
        return self._segments(by_layer=True)

    @cached_property
    def is_bare(self) -> bool:
        """Whether R at level `stage` repeats the calls with no buffer, copy or kept graph."""
        first, *others = self.by_stage
        return not (others or first.keeps or self.changed or self.overwrites)

    def cuts_behind(self, *, is_last: bool) -> list[bool]:
        """For each layer of a stage, whether F cuts the graph behind it.

        A hand-over to the next stage cuts the graph behind the last layer.
        """
        *cuts, last = self.can_cut
        return [*cuts, last and is_last]

    def _segments(self, *, by_layer: bool) -> list[RecomputeSegment]:
        found: list[RecomputeSegment] = []
        for piece in self._pieces():
            keeps = any(self.keeps[call] for call in piece)
            # The end joins the last layer's segment, because the input of the end may be large.
            is_end = piece.start == len(self.can_cut)
            joins = len(found) > 0 and not (keeps or found[-1].keeps or (by_layer and not is_end))
            before = found.pop().pieces if joins else ()
            found.append(RecomputeSegment((*before, piece), keeps))
        return found

    def _pieces(self) -> Iterator[range]:
        start = 0
        for call, can_cut in enumerate((*self.can_cut, True)):
            if can_cut:
                yield range(start, call + 1)
                start = call + 1


class Watch:
    """Watches a forward call by call, all in one graph.

    The graph can be cut behind a call if later calls reach or read earlier tensors only through the
    returned value of the call, and if that value is not written afterwards.

    Args:
        given: the arguments of the first call.
        reads: whether to watch the reads of calls. Compiled calls hide their reads, so the graph is
            not cut behind them.

    Attributes:
        reads: the mode to run the calls in.
    """

    def __init__(self, given: Any, *, reads: bool = True) -> None:
        self.reads = Reads(given) if reads else Unread()
        self._given = [(tensor, version_of(tensor)) for tensor in tensors_of(given)]
        # By call: the returned tensors with their versions, and the edges where gradients enter.
        self._returned: list[list[tuple[Tensor, int]]] = []
        self._edges: list[set[Edge]] = []
        self._crossed: set[int] = set()
        self._keeps: list[bool] = []
        self._owner: dict[Node, int] = {}
        self._trains: list[Tensor] = []

    def after(self, value: Any) -> None:
        """Takes the returned value of the next call."""
        tensors = tensors_of(value)
        edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
        new = self._visit([(edge.node, edge.output_nr) for edge in edges])
        if hidden_in(value):
            self._crossed.add(len(self._keeps))
        self._keeps.append(any(_recomputes(node) for node in new))
        self._edges.append({(edge.node, edge.output_nr) for edge in edges})
        self._returned.append([(tensor, version_of(tensor)) for tensor in tensors])
        self.reads.after(value)

    def seen(self, changed: Names, modules: Sequence[nn.Module]) -> Seen:
        """The result, after the last call.

        Args:
            changed: the buffers that the calls have changed.
            modules: of the calls. If a module keeps an alias of a result (`y.detach()`), the next
                call may read the alias, which looks like a read of the result.
        """
        kept = memory_kept_by(modules)
        for call, returned in enumerate(self._returned):
            if not kept.isdisjoint(memory_of([tensor for tensor, _ in returned])):
                self._crossed.add(call)
        num_calls = len(self._keeps)
        crossed = self._crossed | self.reads.crossed
        can_cut = [
            call not in crossed and not _is_written(self._returned[call])
            for call in range(num_calls - 1)
        ]
        given = {id(tensor) for tensor, _ in self._given}
        trains = [weakref.ref(leaf) for leaf in self._trains if id(leaf) not in given]
        left = [name for name in names_in(modules) if name not in changed]
        return Seen(can_cut, self._keeps, changed, left, _is_written(self._given), trains)

    def _visit(self, edges: list[Edge]) -> list[Node]:
        """The nodes that this call has added; notes calls whose returned values edges bypass."""
        call = len(self._keeps)
        new = []
        while edges:
            edge = edges.pop()
            node = edge[0]
            if node not in self._owner:
                self._owner[node] = call
                new.append(node)
                if hasattr(node, "variable"):
                    self._trains.append(node.variable)
                edges += [(into, number) for into, number in node.next_functions if into]
            for at in range(self._owner[node], call):
                if edge not in self._edges[at]:
                    self._crossed.add(at)
        return new


def without_saved_tensors_hooks() -> AbstractContextManager[object]:
    """A context without the caller's hooks, so that any hooks in it belong to a layer."""
    taken = []

    def take() -> None:
        while (top := top_hooks()) is not None:
            taken.append(top)
            pop_hooks()

    def put_back(_: BaseException | None) -> None:
        for pack, unpack in reversed(taken):
            push_hooks(pack, unpack)

    # A generator would add a traceback to a layer's exception, which some exceptions refuse.
    return _C.Within(take, put_back)


def _is_written(tensors: Sequence[tuple[Tensor, int]]) -> bool:
    return any(version_of(tensor) != version for tensor, version in tensors)


def _recomputes(node: Node) -> bool:
    """Whether a backward of the node runs code of a layer, such as checkpointing."""
    return "Checkpoint" in type(node).__name__ or any(map(_has_hooks, saved_by(node)))


def _has_hooks(saved: Any) -> bool:
    return getattr(saved, "unpack_hook", None) is not None
