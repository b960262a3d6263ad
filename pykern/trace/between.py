"""Values that pass between the stages of a tape, and cuts that are refused because of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

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
        """The values of the batch, or of earlier stages, in whose memory a stage writes.

        The stage copies them when it begins, so that the views that it makes are views of the
        copies. Raises CutError where a write would be lost, because others use the memory as well.
        """
        pieces, tape, users = self.pieces_of(stage), self._tape, self.users
        found: set[int] = set()
        for number in range(self._ends[pieces[0] - 1] if pieces[0] else 0, self._ends[pieces[-1]]):
            for value in tape.instructions[number].overwritten:
                shared = {value, *tape.aliases[value]} & users.keys()
                others = {one for one in shared if self.makers.get(one) != stage}
                come = sorted(one for one in others if stage in users[one])
                if not come:
                    continue
                following = tape.instructions[number:]
                later = {read for one in following for read in one.reads}
                base = value if value in come else come[0]
                unseen = (others & later.union(refs_in(tape.output))) - {base}
                if value != base:
                    # A view is one of one value, which the next stages have from elsewhere.
                    unseen.update(come[1:], [base] if users[base][-1] > stage else [])
                if unseen:
                    is_made = base in self.makers
                    whose = f"a tensor of stage {self.makers[base]}" if is_made else "an argument"
                    raise CutError(
                        f"{tape.instructions[number].where}, in stage {stage}, writes into {whose} "
                        "of which a view is used as well. Cut elsewhere, or write into a copy"
                    )
                found.add(base)
        return sorted(found)

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
    writes = any(instruction.overwritten for instruction in tape.instructions)
    if not piece or not (tape.crossings or tape.in_buffers or writes):
        return None
    try:
        Between(tape, ends, [int(number >= piece) for number in range(len(ends))])
    except CutError as error:
        return str(error)
    return None
