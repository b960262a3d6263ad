"""Recompute: F keeps the inputs of a stage's segments, and R rebuilds their graphs for B.

Recompute must not change any result. R draws the random numbers that F drew, reads the buffers as
F found them and leaves the current ones alone, and gradients add up in the order of a step without
recompute.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast, get_args

from torch import Tensor, nn

from ...kernels import levels as kernels
from ...tensors.trees import tensors_of
from ..autograd.cut import copies
from ..random.compiled import Whole
from ..random.eager import Begins, OwnState
from .buffers import Buffers, BufferVersions, Names, modules_in, names_in
from .cell import Calls, Cell, Drawn, OneGraph, OneGraphOfValues
from .untrained import Untrained
from .watch import RecomputeSegment, Seen, Watch, without_saved_tensors_hooks

# The levels with an R. F keeps the input of each layer, or of the stage.
Inputs = Literal["layer", "stage"]
INPUTS: tuple[Inputs, ...] = get_args(Inputs)
# All levels, in ascending order of recomputed work; the first ones belong to kernels.
Level = kernels.KernelLevel | Inputs
LEVELS: tuple[Level, ...] = (*kernels.LEVELS, *INPUTS)

# The state that F keeps of one microbatch.
KeptMicrobatch = Cell | OneGraph | OneGraphOfValues | Drawn

_NOTHING = nullcontext()
_NO_BUFFERS = Buffers((), ())


class Recompute:
    """The microbatches of a stage that are recomputed.

    The first forward is watched, anew for other settings and for other inputs that need gradients.
    It runs with its whole graph, which shows where the graph can be cut and which side effects must
    not happen twice.

    Attributes:
        levels: of each microbatch; empty for a step without recompute.
        seen: the results of watching, by which of the inputs need gradients.
        cells: by microbatch, what F has kept for R.
        left_alone: the buffers that the current F must not write, None without any.
    """

    def __init__(self) -> None:
        self.seen: dict[tuple[bool, ...], Seen] = {}
        self.levels: Sequence[Level | None] = ()
        self._compiled = False
        self.cells: dict[int, KeptMicrobatch] = {}
        # The layers of the last F, their modules, and by inputs the buffers that F leaves alone.
        self._layers: Sequence[nn.Module] | None = None
        self._modules: Sequence[nn.Module] = ()
        self._left_alone: dict[tuple[bool, ...], BufferVersions] = {}
        self.left_alone: BufferVersions | None = None
        # Whether any microbatch of the step has a level, whether any is recomputed, whether any has
        # the level `stage`, and whether any has a kernel level.
        self.has_levels = self.in_use = self.by_stage = self.in_kernels = False

    def begin(
        self, levels: Sequence[Level | None], *, changed: bool, compiled: bool = False
    ) -> None:
        """Starts a step.

        Args:
            levels: of each microbatch; empty for a step without recompute.
            changed: whether the layers may behave differently from now on.
            compiled: whether any layer is compiled.
        """
        self._compiled = compiled
        # Most steps have no levels, and their actions then skip the lookup.
        self.levels = levels if levels.count(None) < len(levels) else ()
        self.has_levels = len(self.levels) > 0
        self.in_use = any([level in INPUTS for level in self.levels])
        self.by_stage = "stage" in self.levels
        self.in_kernels = any([level in kernels.LEVELS for level in self.levels])
        if changed:
            self.seen = {}

    def leave(self) -> dict[int, KeptMicrobatch]:
        """Returns the state that F has kept, for a backward in another step."""
        left = dict(self.cells)
        self.cells.clear()
        return left

    def resume(self, cells: dict[int, KeptMicrobatch]) -> None:
        """Takes the state back, in the step that has the backward."""
        self.cells.update(cells)

    def end(self) -> None:
        """Releases all objects of the step."""
        self.cells.clear()
        self._layers, self._modules, self._left_alone, self.left_alone = None, (), {}, None

    def twin(self) -> Recompute:
        """A new object that shares the results of watching."""
        twin = Recompute()
        twin.seen = self.seen
        return twin

    def has(self, microbatch: int) -> bool:
        """Whether the microbatch is recomputed."""
        return bool(self.levels) and self.levels[microbatch] in INPUTS

    def keeping(self, microbatch: int) -> AbstractContextManager[object]:
        """A context in which kernels use the microbatch's level, if that is a kernel level."""
        if not self.keeps(microbatch):
            return _NOTHING
        return kernels.keeping(cast(kernels.KernelLevel, self.levels[microbatch]))

    def keeps(self, microbatch: int) -> bool:
        """Whether the level of a microbatch is a kernel level."""
        return bool(self.levels) and self.levels[microbatch] in kernels.LEVELS

    def forward(
        self,
        microbatch: int,
        calls: Calls,
        arguments: tuple[Any, ...],
        layers: Sequence[nn.Module],
        loss_fn: object,
        state: OwnState | Whole | None,
    ) -> None:
        """F: runs the calls, and keeps the state that R needs.

        Args:
            microbatch: its number.
            calls: layers and end.
            arguments: of the first call.
            layers: of the stage, whose buffers F may change.
            loss_fn: the loss of the last stage, which may have buffers as well.
            state: the random state of the action; None if F does not draw.
        """
        by_layer = self.levels[microbatch] == "layer"
        if len(arguments) == 1 and type(arguments[0]) is Tensor:
            needs: tuple[bool, ...] = (arguments[0].requires_grad,)
        else:
            needs = tuple(tensor.requires_grad for tensor in tensors_of(arguments))
        seen = self.seen.get(needs)
        if seen is None:
            watch = Watch(arguments, reads=not self._compiled)
            self.cells[microbatch], self.seen[needs] = _watched(
                watch, calls, arguments, modules_in([*layers, loss_fn]), state, by_layer=by_layer
            )
            return
        kept = copies(arguments) if seen.overwrites else arguments
        if seen.has_buffers:
            self.look(needs, seen, layers, loss_fn)
        buffers = Buffers(self._modules, seen.changed) if seen.changed else _NO_BUFFERS
        segments = seen.by_layer if by_layer else seen.by_stage
        cell = Cell(kept, segments, buffers, by_layer=by_layer)
        cell.forward(calls, arguments, state)
        if self.left_alone is not None:
            self.require_left_alone(needs)
        self.cells[microbatch] = cell

    def look(
        self, needs: tuple[bool, ...], seen: Seen, layers: Sequence[nn.Module], loss_fn: object
    ) -> None:
        """Looks at the buffers as an F is about to find them."""
        if layers is not self._layers:
            self._layers, self._modules = layers, modules_in([*layers, loss_fn])
            self._left_alone = {}
        looked = self._left_alone.get(needs)
        # A hook in a backward may write them, such as an average of gradients.
        if looked is None or looked.written():
            looked = BufferVersions(self._modules, seen.left_alone)
            self._left_alone[needs] = looked
        self.left_alone = looked

    def require_left_alone(self, needs: tuple[bool, ...]) -> None:
        """Raises RuntimeError if F has written a buffer that it had left alone before.

        Args:
            needs: which of the arguments need gradients.
        """
        assert self.left_alone is not None
        if written := self.left_alone.written():
            self.seen[needs] = self.seen[needs].with_changed(written)
            raise _not_kept(self._modules, written)

    def take_whole(self, microbatch: int) -> bool:
        """Whether R has made one graph of a cell; takes its state if so."""
        cell = self.cells[microbatch]
        is_whole = isinstance(cell, Cell) and cell.is_whole
        if is_whole:
            del self.cells[microbatch]
        return is_whole

    def take(self, microbatch: int) -> Cell | None:
        """Takes the state of a microbatch; None without a cell."""
        cell = self.cells.pop(microbatch, None)
        return cell if isinstance(cell, Cell) else None

    @property
    def trains(self) -> Sequence[Tensor]:
        """The leaves that collect gradients in the backward of a recomputed microbatch so far."""
        found = [tensor() for seen in self.seen.values() for tensor in seen.trains]
        return list({id(tensor): tensor for tensor in found if tensor is not None}.values())


def _watched(
    watch: Watch,
    calls: Calls,
    arguments: tuple[Any, ...],
    modules: Sequence[nn.Module],
    state: OwnState | Whole | None,
    *,
    by_layer: bool,
) -> tuple[Cell, Seen]:
    """Runs F of the first microbatch in one graph; returns its state and the observations."""
    buffers, untrained = Buffers(modules, names_in(modules)), Untrained(modules)
    values: list[Any] = []
    begins: list[Begins] = []
    with without_saved_tensors_hooks(), watch.reads:
        following = arguments
        for call in calls:
            begins.append({} if state is None else state.note())
            values.append(call(*following))
            watch.after(values[-1])
            following = (values[-1],)
    untrained.require_unwritten()
    changed = buffers.changed()
    buffers.keep_only(changed)
    seen = watch.seen(changed, modules)
    segments = seen.by_layer if by_layer else seen.by_stage
    if seen.overwrites or any(seen.keeps):
        # F's graph is kept: B repeats a layer by itself, or the input of R was overwritten.
        segments = [RecomputeSegment((range(len(calls)),), keeps=True)]
    cell = Cell(arguments, segments, buffers, by_layer=by_layer)
    for segment in segments:
        cell.add(values[segment.calls[-1]], _first_of([begins[call] for call in segment.calls]))
    return cell, seen


def _not_kept(modules: Sequence[nn.Module], written: Names) -> RuntimeError:
    """The error of layers that write to a buffer in some forwards only."""
    number, name = written[0]
    return RuntimeError(
        f"a forward has written to buffer {name!r} of a layer ({type(modules[number]).__name__}), "
        "which the first forward had left alone: its values were not kept for the recompute. Later "
        "steps keep them: zero the gradients and run the step again, or leave out recompute"
    )


def _first_of(begins: Sequence[Begins]) -> Begins:
    """The first state of each generator in some calls, which run one after another."""
    merged: Any = type(begins[0])()
    for one in reversed(begins):
        merged.update(one)
    return merged  # type: ignore[no-any-return]
