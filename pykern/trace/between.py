"""Values that pass between the stages of a tape, and cuts that are refused because of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from .copied import copied
from .errors import CutError
from .tape import Instruction, Tape
from .values import refs_in


class Between:
    """The makers, users and writers of the values of a tape that is cut into stages.

    Args:
        tape: the whole.
        ends: for each piece, the number of instructions that it and those before it have.
        stage_of: for each piece, the stage that runs it.

    Attributes:
        pieces: the instructions of each piece.
        makers: by value, the stage that makes it; those without one are the batch's.
        users: by value, the stages that use it, in ascending order.
        copied: by stage, the values that it writes and that are not its own.

    Raises:
        CutError: a value that crosses from stage to stage is written where that would be lost, or
            crosses where nobody hands it over.
    """

    def __init__(self, tape: Tape, ends: Sequence[int], stage_of: Sequence[int]) -> None:
        self._tape = tape
        self._ends = ends
        self._stage_of = stage_of
        self.pieces: list[Sequence[Instruction]] = [
            tape.instructions[start:end] for start, end in pairwise([0, *ends])
        ]
        self.makers = {
            value: stage
            for stage, inside in zip(stage_of, self.pieces, strict=True)
            for instruction in inside
            for value in instruction.makes
        }
        self._refuse_crossings()
        self.users = self._users()
        self._refuse_buffers()
        self.copied = [self._copied(stage) for stage in range(stage_of[-1] + 1)]

    def pieces_of(self, stage: int) -> list[int]:
        """The numbers of a stage's pieces."""
        return [piece for piece, where in enumerate(self._stage_of) if where == stage]

    def _copied(self, stage: int) -> list[int]:
        pieces = self.pieces_of(stage)
        first, last = pieces[0], pieces[-1]
        span = range(self._ends[first - 1] if first else 0, self._ends[last])
        return copied(self._tape, span, stage, self.makers, self.users)

    def _users(self) -> dict[int, list[int]]:
        users: dict[int, list[int]] = {}
        for stage, inside in zip(self._stage_of, self.pieces, strict=True):
            for instruction in inside:
                for value in instruction.reads:
                    users.setdefault(value, []).append(stage)
        for value in refs_in(self._tape.output):
            users.setdefault(value, []).append(self._stage_of[-1])
        return {value: sorted(set(stages)) for value, stages in users.items()}

    def _refuse_crossings(self) -> None:
        """Refuses tensors that pass from stage to stage beside the arguments of modules."""
        for crossing in self._tape.crossings:
            maker, reader = (
                self._stage_of[bisect_right(self._ends, number)]
                for number in (crossing.maker, crossing.reader)
            )
            if maker != reader:
                raise CutError(
                    f"{crossing.text}, in stages {reader} and {maker}, which hand over arguments "
                    "and results only. Pass it as an argument, or have both in one stage "
                    "(split_at=[...], or whole=[...] with a module around both)"
                )

    def _refuse_buffers(self) -> None:
        """Refuses to hand over memory that the next microbatch writes."""
        for value, name in self._tape.in_buffers.items():
            stages = {self.makers[value]} if value in self.makers else set[int]()
            if len(stages.union(self.users.get(value, []))) > 1:
                raise CutError(
                    f"the forward writes into {name} and uses it in several stages, "
                    "where it would be another microbatch's. Use a copy (clone())"
                )


def why_not(tape: Tape, ends: Sequence[int], piece: int) -> str | None:
    """The reason why no stage can begin with a piece; None where one can."""
    if not piece or not may_refuse(tape):
        return None
    try:
        Between(tape, ends, [int(number >= piece) for number in range(len(ends))])
    except CutError as error:
        return str(error)
    return None


def may_refuse(tape: Tape) -> bool:
    """Whether any cut of the tape can be refused: only where something is written or left."""
    writes = any(instruction.overwritten for instruction in tape.instructions)
    return bool(tape.crossings or tape.in_buffers or writes)
