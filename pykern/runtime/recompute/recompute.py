"""Recompute: F keeps the inputs of a stage's segments, and R makes their graphs again for B.

Nothing else may tell. R draws the random numbers that F drew, finds the buffers that F found and
leaves those that there are, and gradients add up in the order in which they would without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast, get_args

from torch import Tensor

from ...kernels import levels as kernels
from ...kernels import seeds
from ...tensors.trees import tensors_of
from ...torch_private import top_hooks
from ..autograd.cut import copies
from ..random.compiled import Whole
from ..random.eager import Begins, OwnState
from .buffers import Buffers, modules_in, names_in
from .cell import Calls, Cell, OneGraph
from .watch import RecomputeSegment, Seen, Watch, without_saved_tensors_hooks

# What F keeps where there is an R: the input of each layer, or of the stage.
Inputs = Literal["layer", "stage"]
INPUTS: tuple[Inputs, ...] = get_args(Inputs)
# What F keeps, in ascending order of what is computed again; the first are those of kernels.
Level = kernels.KernelLevel | Inputs
LEVELS: tuple[Level, ...] = (*kernels.LEVELS, *INPUTS)

# What F keeps of one microbatch.
KeptMicrobatch = Cell | OneGraph

_NOTHING = nullcontext()
_NO_BUFFERS = Buffers((), ())


class Recompute:
    """The microbatches of a stage that are recomputed.

    The first forward under some settings, of inputs of which the same need gradients, is watched:
    it runs with its whole graph, which shows where it can be cut and what must not happen twice.
    """

    def __init__(self) -> None:
        # By which of the inputs need gradients.
        self._seen: dict[tuple[bool, ...], Seen] = {}
        self._levels: Sequence[Level | None] = ()
        self._compiled = False
        self._cells: dict[int, KeptMicrobatch] = {}
        # Whether any microbatch of the step has a level, and whether any is recomputed.
        self.has_levels = False
        self.in_use = False

    def begin(
        self, levels: Sequence[Level | None], *, changed: bool, compiled: bool = False
    ) -> None:
        """Starts a step.

        Args:
            levels: of each microbatch; empty: none is recomputed.
            changed: whether the layers may do something else from now on.
            compiled: whether any of them is compiled.
        """
        self._compiled = compiled
        # Most steps have none, and their actions are to be spared the look.
        self._levels = levels if levels.count(None) < len(levels) else ()
        self.has_levels = len(self._levels) > 0
        self.in_use = any(level in INPUTS for level in self._levels)
        if changed:
            self._seen = {}

    def leave(self) -> dict[int, KeptMicrobatch]:
        """Gives away what F has kept, for a backward in another step."""
        left, self._cells = self._cells, {}
        return left

    def resume(self, cells: dict[int, KeptMicrobatch]) -> None:
        """Takes it in the step that has the backward."""
        self._cells = dict(cells)

    def end(self) -> None:
        """Lets go of everything that belongs to the step."""
        self._cells.clear()

    def twin(self) -> Recompute:
        """Another that knows what this one has seen."""
        twin = Recompute()
        twin._seen = self._seen
        return twin

    def has(self, microbatch: int) -> bool:
        """Whether the microbatch is recomputed."""
        return bool(self._levels) and self._levels[microbatch] in INPUTS

    def keeping(self, microbatch: int) -> AbstractContextManager[object]:
        """Within it, kernels keep what the level of a microbatch says, if one of theirs."""
        if not self.keeps(microbatch):
            return _NOTHING
        return kernels.keeping(cast(kernels.KernelLevel, self._levels[microbatch]))

    def keeps(self, microbatch: int) -> bool:
        """Whether the level of a microbatch is one of kernels."""
        return bool(self._levels) and self._levels[microbatch] in kernels.LEVELS

    def forward(
        self,
        microbatch: int,
        calls: Calls,
        arguments: tuple[Any, ...],
        holders: Sequence[object],
        state: OwnState | Whole | None,
    ) -> None:
        """F: runs the calls and keeps what R needs.

        Args:
            microbatch: which one.
            calls: layers and end.
            arguments: of the first call.
            holders: those of whose modules F may change buffers.
            state: that random operations draw from, None where there are none.
        """
        by_layer = self._levels[microbatch] == "layer"
        if len(arguments) == 1 and type(arguments[0]) is Tensor:
            needs: tuple[bool, ...] = (arguments[0].requires_grad,)
        else:
            needs = tuple(tensor.requires_grad for tensor in tensors_of(arguments))
        seen = self._seen.get(needs)
        cell: KeptMicrobatch
        if seen is None:
            watch = Watch(arguments, reads=not self._compiled)
            cell, self._seen[needs] = _watched(
                watch, calls, arguments, holders, state, by_layer=by_layer
            )
        elif not by_layer and seen.whole is not None and _is_bare(state):
            cell = OneGraph(calls, seen.whole, arguments)
        else:
            kept = copies(arguments) if seen.overwrites else arguments
            changed = seen.changed
            buffers = Buffers(modules_in(holders), changed) if changed else _NO_BUFFERS
            segments = seen.by_layer if by_layer else seen.by_stage
            cell = in_parts = Cell(kept, segments, buffers, by_layer=by_layer)
            in_parts.forward(calls, arguments, state)
        self._cells[microbatch] = cell

    def again(self, microbatch: int, calls: Calls) -> Sequence[Tensor]:
        """R: returns the tensors that backward starts from."""
        return self._cells[microbatch].again(calls) if microbatch in self._cells else ()

    def take_whole(self, microbatch: int) -> bool:
        """Whether a backward is that of one graph, with nothing around it; takes what there is."""
        cell = self._cells.get(microbatch)
        if cell is None:
            return not self.keeps(microbatch)
        if cell.is_whole:
            del self._cells[microbatch]
        return cell.is_whole

    def take(self, microbatch: int) -> Cell | None:
        """What there is of a microbatch for its backward, if that may be in parts."""
        cell = self._cells.pop(microbatch, None)
        return cell if isinstance(cell, Cell) else None

    @property
    def trains(self) -> Sequence[Tensor]:
        """What has been seen to collect gradients in a backward of the stage."""
        found = [tensor() for seen in self._seen.values() for tensor in seen.trains]
        return list({id(tensor): tensor for tensor in found if tensor is not None}.values())


def _is_bare(state: OwnState | Whole | None) -> bool:
    """Whether an F has nothing around it: random numbers, seeds, hooks of the caller."""
    return state is None and not seeds.are_provided() and top_hooks() is None


def _watched(
    watch: Watch,
    calls: Calls,
    arguments: tuple[Any, ...],
    holders: Sequence[object],
    state: OwnState | Whole | None,
    *,
    by_layer: bool,
) -> tuple[Cell, Seen]:
    """F of the first microbatch, in one graph, and what it shows."""
    modules = modules_in(holders)
    buffers = Buffers(modules, names_in(modules))
    values: list[Any] = []
    begins: list[Begins] = []
    with without_saved_tensors_hooks(), watch.reads:
        following = arguments
        for call in calls:
            begins.append({} if state is None else state.note())
            values.append(call(*following))
            watch.after(values[-1])
            following = (values[-1],)
    changed = buffers.changed()
    buffers.keep_only(changed)
    seen = watch.seen(changed, modules)
    segments = seen.by_layer if by_layer else seen.by_stage
    if seen.overwrites or any(seen.keeps):
        # R would call a layer for the second time that B calls for the third, or has no input.
        segments = [RecomputeSegment((range(len(calls)),), keeps=True)]
    cell = Cell(arguments, segments, buffers, by_layer=by_layer)
    for segment in segments:
        cell.add(values[segment.calls[-1]], _first_of([begins[call] for call in segment.calls]))
    return cell, seen


def _first_of(begins: Sequence[Begins]) -> Begins:
    """The first state of each generator in some calls, one after another."""
    merged = type(begins[0])()
    for one in reversed(begins):
        merged.update(one)
    return merged
