"""Transfers between devices for torch's runtime: sends, receives, and their order.

Stages on one device need no messages. Messages from one device to another are received in the order
of sending, because torch matches sends and receives by that order alone.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from pykern._C import Action, Costs, Kind, Placement, Plan, Span, simulate

T = TypeVar("T")
# A slot holds one action, or two actions that share it.
Slot = tuple[Action, ...]

# The default costs that order messages. The tiny transfer time orders messages that are made at the
# same time: a message whose inputs came a longer way goes later.
ORDER_COSTS = Costs(1, 2, transfer_ns=2**-10)


class Message(NamedTuple):
    """An output on its way down, or a gradient on its way up; `stage` is the sender's."""

    down: bool
    stage: int
    microbatch: int

    @property
    def reader(self) -> int:
        """The stage that receives the message."""
        return self.stage + 1 if self.down else self.stage - 1


class Transfer(NamedTuple):
    """One end of a message, as an item of a row."""

    sends: bool
    message: Message

    def __str__(self) -> str:
        """The transfer as torch writes it, with the stage of the row it stands in."""
        stage = self.message.stage if self.sends else self.message.reader
        word = "SEND" if self.sends else "RECV"
        return f"{stage}{word}_{'F' if self.message.down else 'B'}{self.message.microbatch}"


def slots_of(plan: Plan) -> list[list[Slot]]:
    """The rows with overlapped pairs as one item."""
    return [in_slots(row, pairs) for row, pairs in zip(plan.rows, plan.overlaps, strict=True)]


def in_slots(row: tuple[T, ...], pairs: Sequence[int]) -> list[tuple[T, ...]]:
    """Actions, or their spans, one by one, or by twos where pairs begin."""
    seconds = {first + 1 for first in pairs}
    return [row[i : i + 1 + (i + 1 in seconds)] for i in range(len(row)) if i not in seconds]


def sent_by(action: Action, placement: Placement) -> Message | None:
    """The message that leaves the device after the action, if there is one."""
    if action.kind is Kind.W:
        return None
    message = Message(action.kind is Kind.F, action.stage, action.microbatch)
    return message if crosses(message, placement) else None


def read_by(action: Action, placement: Placement) -> Message | None:
    """The message that must arrive before the action starts, if there is one."""
    if action.kind is Kind.W:
        return None
    down = action.kind is Kind.F
    message = Message(down, action.stage + (-1 if down else 1), action.microbatch)
    return message if crosses(message, placement) else None


def crosses(message: Message, placement: Placement) -> bool:
    """Whether the message has a sender and a reader, on different devices."""
    stages = range(placement.num_stages)
    if message.stage not in stages or message.reader not in stages:
        return False
    return placement.device_of(message.stage) != placement.device_of(message.reader)


def in_order(plan: Plan, costs: Costs = ORDER_COSTS) -> list[Message]:
    """All messages in the order in which the simulator makes them.

    Where several messages are made at the same time, the message that is read first goes first.
    """
    unit, spans = spans_of(plan, ORDER_COSTS), spans_of(plan, costs)
    readers = {read_by(action, plan.placement): span for action, span in spans.items()}

    def when(sender: Action) -> tuple[float, float, float]:
        # Actions that take no time end together with their inputs; no action of `unit` does.
        reader = readers[sent_by(sender, plan.placement)]
        return spans[sender].end_ns, unit[sender].end_ns, reader.start_ns

    senders = [action for action in spans if sent_by(action, plan.placement)]
    sent = (sent_by(action, plan.placement) for action in sorted(senders, key=when))
    return [message for message in sent if message is not None]


def require_all_trained(plan: Plan) -> None:
    """Raises ValueError if stages that are not trained stand in front of trained stages."""
    if 0 < plan.first_trained < plan.num_stages:
        raise ValueError(
            "the plan must have a backward of every stage for torch's runtime, got one from stage "
            f"{plan.first_trained} on"
        )


def spans_of(plan: Plan, costs: Costs) -> dict[Action, Span]:
    """The span of each action; the actions of a device are in the order of its row."""
    return {span.action: span for row in simulate(plan, costs).rows for span in row}


def with_transfers(plan: Plan, costs: Costs = ORDER_COSTS) -> list[list[Slot | Transfer]]:
    """The rows with sends and receives.

    Every device sends and receives in one global order of messages, the order in which they are
    made. A send stands behind the action that makes its message. A receive stands as early as
    possible, first or right behind the send that precedes it in the global order, so that no send
    waits for its receive. The rows cannot deadlock even if every transfer waits for its other end:
    whatever a row sends or computes before a transfer needs only earlier transfers, so each
    transfer can follow from the transfers before it.

    Args:
        plan: A plan of one replica and one slice, with F, B, I and W only.
        costs: The costs that order the messages.

    Returns:
        A row for each device.

    Raises:
        ValueError: A stage without a backward stands in front of a stage with a backward, but all
            of torch's stages send gradients back.
    """
    require_all_trained(plan)
    messages = in_order(plan, costs)
    number = {message: index for index, message in enumerate(messages)}
    inboxes: list[deque[Message]] = [deque() for _ in plan.rows]
    for message in messages:
        inboxes[plan.placement.device_of(message.reader)].append(message)
    return [
        list(row_with_transfers(slots, inbox, number, plan.placement))
        for slots, inbox in zip(slots_of(plan), inboxes, strict=True)
    ]


def row_with_transfers(
    slots: Sequence[Slot],
    inbox: deque[Message],
    number: Mapping[Message, int],
    placement: Placement,
) -> Iterator[Slot | Transfer]:
    """One device's row; `inbox` holds the messages that the device receives, in order.

    A pair in a slot makes two messages at once. They are sent in the global order as well: a device
    that receives both messages matches them by order alone, and they may have the same shape.
    """
    sent = [
        sorted((m for action in slot if (m := sent_by(action, placement))), key=number.__getitem__)
        for slot in slots
    ]
    sends = deque(number[message] for messages in sent for message in messages)

    def receive_up_to_next_send() -> Iterator[Transfer]:
        while inbox and (not sends or number[inbox[0]] < sends[0]):
            yield Transfer(False, inbox.popleft())

    yield from receive_up_to_next_send()
    for slot, messages in zip(slots, sent, strict=True):
        yield slot
        for message in messages:
            yield Transfer(True, message)
            sends.popleft()
            yield from receive_up_to_next_send()


class ReadItem(NamedTuple):
    """An item of a row that was read, with its line and its place in the line."""

    line: int
    number: int
    item: Slot | Transfer

    @property
    def where(self) -> str:
        """The place in words; made only for a message, as a file may have millions of cells."""
        return f"line {self.line}, cell {self.number}"


def require_paired(rows: Sequence[Iterable[ReadItem]], placement: Placement) -> None:
    """Refuses rows whose sends and receives are not exactly those that their actions need.

    Args:
        rows: The rows of a plan that passes `check`, with transfers between the actions.
        placement: The placement of that plan.

    Raises:
        ValueError: A transfer is missing, superfluous, on a wrong device, before its maker or after
            its reader, or in another order at the receiver than at the sender.
    """
    for row in rows:
        require_row(row, placement)
    links: dict[tuple[int, int], tuple[list[ReadItem], list[ReadItem]]] = defaultdict(
        lambda: ([], [])
    )
    for row in rows:
        for cell in row:
            if isinstance(cell.item, Transfer):
                message = cell.item.message
                link = placement.device_of(message.stage), placement.device_of(message.reader)
                links[link][cell.item.sends].append(cell)
    for (sender, receiver), (received, sent) in links.items():
        for left, came in zip(sent, received, strict=True):
            if left.item.message != came.item.message:  # type: ignore[union-attr]
                raise ValueError(
                    f"{came.where}: transfers must be received in the order of sending, got "
                    f"{came.item} where {left.item} is due. Device {receiver} receives from device "
                    f"{sender}"
                )


def require_row(row: Iterable[ReadItem], placement: Placement) -> None:
    """Refuses a row that sends a message before making it, or computes before receiving one."""
    made: dict[Message, ReadItem] = {}
    came: dict[Message, ReadItem] = {}
    for cell in row:
        item = cell.item
        if isinstance(item, Transfer):
            if not item.sends:
                came[item.message] = cell
            elif made.pop(item.message, None) is None:
                raise ValueError(
                    f"{cell.where}: transfers must send what their device has made before, got "
                    f"{item}"
                )
            continue
        for action in item:
            message = read_by(action, placement)
            if message and came.pop(message, None) is None:
                missing = Transfer(False, message)
                raise ValueError(f"{cell.where}: {action} must have {missing} before it, got none")
        for action in item:
            if message := sent_by(action, placement):
                made[message] = cell
    require_empty(made, sends=True, what="is missing after it")
    require_empty(came, sends=False, what="has no reader after it")


def require_empty(left: Mapping[Message, ReadItem], *, sends: bool, what: str) -> None:
    """Refuses the first message that is left over at the end of a row."""
    for message, cell in left.items():
        raise ValueError(f"{cell.where}: {Transfer(sends, message)} {what}")
