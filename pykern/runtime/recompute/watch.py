"""What a forward of a stage shows of its layers: where it can be cut, and what it changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from ... import _C
from ...tensors.trees import tensors_of
from ...torch_private import pop_hooks, push_hooks, top_hooks, version_of
from ..autograd.cut import hidden_in
from ..autograd.graph import saved_by
from .buffers import Names
from .reads import Reads, Unread, memory_kept_by, memory_of

Edge = tuple[Node, int]


@dataclass(frozen=True, slots=True)
class RecomputeSegment:
    """Some of a stage's calls, one after another, whose graph is made and freed as one.

    Attributes:
        pieces: the numbers of the calls, in parts between which the graph can be cut.
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
    """What has been seen of a stage's calls, which are its layers and then the end of its F.

    Attributes:
        can_cut: for each call but the last, whether the graph can be cut behind it.
        keeps: for each call, whether it recomputes by itself, as activation checkpointing does.
        changed: the buffers that F changes.
        overwrites: whether a layer writes into what the stage is given.
        trains: what collects gradients in a backward, beside what the stage is given. Replicas have
            other parameters in each step, so these must not be kept alive.
    """

    can_cut: Sequence[bool]
    keeps: Sequence[bool]
    changed: Names
    overwrites: bool
    trains: Sequence[weakref.ref[Tensor]]

    @cached_property
    def by_stage(self) -> list[RecomputeSegment]:
        """The calls in segments, as long as they can be."""
        return self._segments(by_layer=False)

    @cached_property
    def by_layer(self) -> list[RecomputeSegment]:
        """The calls in segments, one for each layer where it can be."""
        return self._segments(by_layer=True)

    @cached_property
    def whole(self) -> RecomputeSegment | None:
        """All calls, if R repeats them at level `stage` with nothing to put back or to leave."""
        first, *others = self.by_stage
        is_bare = not (others or first.keeps or self.changed or self.overwrites)
        return first if is_bare else None

    def _segments(self, *, by_layer: bool) -> list[RecomputeSegment]:
        found: list[RecomputeSegment] = []
        for piece in self._pieces():
            keeps = any(self.keeps[call] for call in piece)
            # The end belongs to the last layer: its input may be large.
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
    """Looks at a forward call by call, all in one graph.

    The graph can be cut behind a call where everything that later calls reach or read of it goes by
    way of what the call returns, and none of that is written afterwards.

    Args:
        given: what the first call gets.
        reads: whether to look at what calls read. Compiled ones do not let that be seen, and behind
            these no graph is cut.

    Attributes:
        reads: the mode to run the calls in.
    """

    def __init__(self, given: Any, *, reads: bool = True) -> None:
        self.reads = Reads(given) if reads else Unread()
        self._given = [(tensor, version_of(tensor)) for tensor in tensors_of(given)]
        # By call: what it has returned, with the versions, and where gradients enter its graph.
        self._returned: list[list[tuple[Tensor, int]]] = []
        self._edges: list[set[Edge]] = []
        self._crossed: set[int] = set()
        self._keeps: list[bool] = []
        self._owner: dict[Node, int] = {}
        self._trains: list[Tensor] = []

    def after(self, value: Any) -> None:
        """A call has returned this."""
        tensors = tensors_of(value)
        edges = [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]
        new = self._visit([(edge.node, edge.output_nr) for edge in edges])
        if hidden_in(value):
            self._crossed.add(len(self._keeps))
        self._keeps.append(any(_recomputes(node) for node in new))
        self._edges.append({(edge.node, edge.output_nr) for edge in edges})
        self._returned.append([(tensor, version_of(tensor)) for tensor in tensors])
        self.reads.after(value)

    def seen(self, changed: Names, modules: Iterable[nn.Module]) -> Seen:
        """The result, after the last call.

        Args:
            changed: the buffers that the calls have changed.
            modules: those of the calls. One that keeps an alias of a result (`y.detach()`) may be
                read by the next call, which looks like a read of the result.
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
        return Seen(can_cut, self._keeps, changed, _is_written(self._given), trains)

    def _visit(self, edges: list[Edge]) -> list[Node]:
        """The nodes that this call has added; notes behind which calls others pass by."""
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
    """Takes the caller's hooks away, so that any that are found belong to a layer."""
    taken = []

    def take() -> None:
        while (top := top_hooks()) is not None:
            taken.append(top)
            pop_hooks()

    def put_back(_: BaseException | None) -> None:
        for pack, unpack in reversed(taken):
            push_hooks(pack, unpack)

    # Not a generator: it would put a traceback on an exception of a layer, which some refuse.
    return _C.Within(take, put_back)


def _is_written(tensors: Sequence[tuple[Tensor, int]]) -> bool:
    return any(version_of(tensor) != version for tensor, version in tensors)


def _recomputes(node: Node) -> bool:
    """Whether a backward of the node calls what a layer has prepared for it."""
    return "Checkpoint" in type(node).__name__ or any(map(_has_hooks, saved_by(node)))


def _has_hooks(saved: Any) -> bool:
    return getattr(saved, "unpack_hook", None) is not None
