"""The values that a stage copies because it writes them, and they are not its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import CutError
from .tape import Tape
from .values import refs_in


def copied(
    tape: Tape,
    span: range,
    stage: int,
    makers: Mapping[int, int],
    users: Mapping[int, Sequence[int]],
) -> list[int]:
    """The values of the batch, or of earlier stages, in whose memory a stage writes.

    The stage copies them when it begins, so that the views that it makes are views of the copies.

    Args:
        tape: the whole.
        span: numbers of the stage's instructions.
        stage: its number.
        makers: by value, the stage that makes it; those without one are the batch's.
        users: by value, the stages that use it, in ascending order.

    Raises:
        CutError: a write would be lost, because others use the memory as well.
    """
    found: set[int] = set()
    for number in span:
        for value in tape.instructions[number].overwritten:
            shared = {value, *tape.aliases[value]} & users.keys()
            others = {one for one in shared if makers.get(one) != stage}
            come = sorted(one for one in others if stage in users[one])
            if not come:
                continue
            following = tape.instructions[number:]
            later = {read for one in following for read in one.reads}.union(refs_in(tape.output))
            base = value if value in come else come[0]
            unseen = (others & later) - {base}
            if value != base:
                # A view is one of one value, which the next stages have from elsewhere.
                unseen.update(come[1:], [base] if users[base][-1] > stage else [])
            if unseen:
                whose = f"a tensor of stage {makers[base]}" if base in makers else "an argument"
                raise CutError(
                    f"{tape.instructions[number].where}, in stage {stage}, writes into {whose} of "
                    "which a view is used as well. Cut elsewhere, or write into a copy"
                )
            found.add(base)
    return sorted(found)
