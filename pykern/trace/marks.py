"""Cuts at marks: where a forward calls a function for that, and at calls of named modules."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from ..tensors.trees import Call
from .cut_tape import CutTape
from .model import Traced
from .recorder import Recorder
from .tape import Instruction, Tape


@dataclass(frozen=True)
class Marks:
    """The places at which a forward is cut.

    Attributes:
        function: the function that marks a place when the forward calls it.
        before: modules that have a mark before each call.
        behind: modules that have a mark behind each call.
        around: modules whose forwards contain marks; these are looked into.
    """

    function: Callable[[], None]
    before: Collection[nn.Module]
    behind: Collection[nn.Module]
    around: Collection[nn.Module]


class Mark(Instruction):
    """A place where a tape is cut, which does nothing."""

    def __init__(self) -> None:
        super().__init__(_nothing, ((), {}), [], [], None, "a mark")

    @property
    def anchor(self) -> str:
        """Its name in a cut, which a module cannot have by accident."""
        return "pipe_split()"


class Marked(Traced):
    """A model whose recorded forward is cut at marks.

    Args:
        model: as of `Traced`.
        sample: as of `Traced`.
        marks: where the forward is cut.

    Attributes:
        parts: ranges of segments between marks, without parts in which the sample's forward
            does nothing; at least one.
    """

    def __init__(self, model: nn.Module, sample: Call, marks: Marks) -> None:
        self._marks = marks
        super().__init__(model, sample, 1)
        (cut_tape,) = self._cut_tapes
        self.parts = _parts(cut_tape, model)

    def _first_opened(self, num_stages: int, split_at: Collection[str]) -> set[nn.Module]:
        del num_stages, split_at
        return {self._model, *self._marks.around}

    def _recorder(self, *args: Any) -> Recorder:
        return _MarkedRecorder(self._marks, *args)


class _MarkedRecorder(Recorder):
    """Records marks as instructions, one of them before everything else."""

    def __init__(self, marks: Marks, *args: Any) -> None:
        super().__init__(*args)
        self._marks = marks

    def record(
        self, model: nn.Module, inputs: list[Tensor], call: Call, *, settling: bool = False
    ) -> Tape:
        self._mark()
        return super().record(model, inputs, call, settling=settling)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._marks.function:
            return self._mark()
        return super().__torch_function__(func, types, args, kwargs)

    def call_module(
        self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if module in self._marks.before:
            self._mark()
        returned = super().call_module(module, call, args, kwargs)
        if module in self._marks.behind:
            self._mark()
        return returned

    def _mark(self) -> None:
        self._instructions.append(Mark())


def _parts(cut_tape: CutTape, model: nn.Module) -> list[range]:
    """The segments from mark to mark. An empty part is joined to the part before it."""
    starts: list[int] = []
    start = 0
    for number, (first, end) in enumerate(pairwise([0, *cut_tape.ends])):
        inside = cut_tape.tape.instructions[first:end]
        if isinstance(inside[0], Mark):
            start = number
        if start not in starts and any(_does_something(one, model) for one in inside):
            starts.append(start)
    # An empty first part is joined to the part behind it.
    return [range(*ends) for ends in pairwise([0, *starts[1:], len(cut_tape.ends)])]


def _does_something(instruction: Instruction, model: nn.Module) -> bool:
    if isinstance(instruction.target, str):
        return not isinstance(model.get_submodule(instruction.target), nn.Identity)
    return not isinstance(instruction, Mark)


def _nothing() -> None:
    pass
