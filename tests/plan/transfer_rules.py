"""The rules of torch.distributed for rows with sends and receives, checked from their text alone.

Nothing here is taken from the code that writes the rows: neither their order nor their grammar.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

CELL = re.compile(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|F|B|I|W|REDUCE_GRAD)(\d*)")


class Step(NamedTuple):
    """An action, or one end of a message: what it is called, of which stage and microbatch."""

    stage: int
    name: str
    microbatch: int


class Message(NamedTuple):
    """A message from one stage to the next or to the one before."""

    sender: int
    reader: int
    microbatch: int


Link = tuple[int, int]


def steps_of(cell: str) -> list[Step]:
    """One step, or the two of a pair."""
    return [Step(int(s), name, int(m or 0)) for s, name, m in CELL.findall(cell)]


def message_of(step: Step) -> Message | None:
    """The message of which this is an end."""
    away = 1 if step.name.endswith("F") else -1
    if step.name.startswith("SEND_"):
        return Message(step.stage, step.stage + away, step.microbatch)
    if step.name.startswith("RECV_"):
        return Message(step.stage - away, step.stage, step.microbatch)
    return None


class Rows:
    """The rows of all ranks.

    Args:
        rows: The cells of each rank.
    """

    def __init__(self, rows: Sequence[Sequence[str]]) -> None:
        self.rows = [[steps_of(cell) for cell in row] for row in rows]
        self.rank_of = {
            step.stage: rank
            for rank, row in enumerate(self.rows)
            for steps in row
            for step in steps
            if step.name in "FBIW"
        }

    def link_of(self, message: Message) -> Link:
        """From which rank to which."""
        return self.rank_of[message.sender], self.rank_of[message.reader]

    def expect_matched(self) -> None:
        """Every rank must receive from another what that sends, in the order of sending."""
        sent: dict[Link, list[Message]] = defaultdict(list)
        received: dict[Link, list[Message]] = defaultdict(list)
        for rank, row in enumerate(self.rows):
            for step in (step for steps in row for step in steps):
                if (message := message_of(step)) is not None:
                    sends = step.name.startswith("SEND_")
                    link = self.link_of(message)
                    assert rank == link[not sends], f"{step} stands on rank {rank}"
                    (sent if sends else received)[link].append(message)
        assert sent == received

    def expect_computable(self) -> None:
        """Every rank must have what an action needs before it, and sends what it has made."""
        for rank, row in enumerate(self.rows):
            here: set[object] = set()
            for steps in row:
                for step in steps:
                    if (message := message_of(step)) is not None:
                        if step.name.startswith("SEND_"):
                            assert made(message) & here, f"{step} sends what is not made yet"
                        else:
                            here.add(message)
                    else:
                        missing = [one for one in self.inputs(rank, step) if one not in here]
                        assert not missing, f"{step} lacks {missing}"
                here.update(steps)

    def inputs(self, rank: int, step: Step) -> Iterator[Message]:
        """The messages that must arrive from another rank before the step."""
        sender = step.stage + {"F": -1, "B": 1, "I": 1}.get(step.name, 0)
        if sender != step.stage and self.rank_of.get(sender, rank) != rank:
            yield Message(sender, step.stage, step.microbatch)

    def expect_no_deadlock(self, *, batched: bool) -> None:
        """Every rank must come to its end though each transfer waits for its other end.

        Args:
            batched: Whether transfers that stand side by side are issued as one batch; else each
                waits before the next is issued.
        """
        left = [list(self.batches(row, batched)) for row in self.rows]
        open_ends = [list(batches.pop(0)) if batches else [] for batches in left]
        moving = True
        while moving:
            moving = False
            for rank, ends in enumerate(open_ends):
                for end in list(ends):
                    moving |= self.meet(open_ends, rank, end)
                while not open_ends[rank] and left[rank]:
                    open_ends[rank] = left[rank].pop(0)
                    moving = True
        waiting = {rank: ends for rank, ends in enumerate(open_ends) if ends}
        assert not waiting, f"these wait for each other: {waiting}"

    def batches(self, row: Sequence[Sequence[Step]], batched: bool) -> Iterator[list[Step]]:
        """The transfers that a rank waits for together."""
        transfers = [(place, steps[0]) for place, steps in enumerate(row) if message_of(steps[0])]
        keys = (
            (place - number if batched else number, step)
            for number, (place, step) in enumerate(transfers)
        )
        for _, group in groupby(keys, key=lambda item: item[0]):
            yield [step for _, step in group]

    def meet(self, open_ends: list[list[Step]], rank: int, end: Step) -> bool:
        """Ends a send and its receive if each is the first open one of its direction."""
        message = message_of(end)
        assert message is not None
        link = self.link_of(message)
        if not end.name.startswith("SEND_") or self.first(open_ends[rank], "SEND_", link) != end:
            return False
        other = self.first(open_ends[link[1]], "RECV_", link)
        if other is None:
            return False
        assert message_of(other) == message, f"{other} receives {message}"
        open_ends[rank].remove(end)
        open_ends[link[1]].remove(other)
        return True

    def first(self, ends: Sequence[Step], kind: str, link: Link) -> Step | None:
        """The first of the ends on a link."""
        return next(
            (
                end
                for end in ends
                if end.name.startswith(kind)
                and (message := message_of(end)) is not None
                and self.link_of(message) == link
            ),
            None,
        )


def made(message: Message) -> set[object]:
    """The actions any of which makes it."""
    names = "F" if message.reader > message.sender else "BI"
    return {Step(message.sender, name, message.microbatch) for name in names}


def expect_runnable(cells: Sequence[Sequence[str]]) -> None:
    """All of these rules."""
    rows = Rows(cells)
    rows.expect_matched()
    rows.expect_computable()
    for batched in (False, True):
        rows.expect_no_deadlock(batched=batched)
