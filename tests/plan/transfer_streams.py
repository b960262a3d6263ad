"""When rows with sends and receives end where transfers run one after another, as NCCL's do."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NamedTuple

from pykern.plan import Action, Kind, Placement
from pykern.plan.files.torch_csv import PER_STAGE, parse
from pykern.plan.files.transfers import Message, Transfer, read_by


class Posted(NamedTuple):
    """A transfer that the host has given to a stream, which waits for the compute before it."""

    message: Message
    ready_ns: float


class Streams:
    """The order of actions and transfers: a compute stream for each device, and streams of
    transfers.

    Args:
        rows: Cells of each device.
        cost_of: The time of an action.
        transfer_ns: The time of a message, from the time when both ends are at it.
        by_pair: Whether a device has a stream for each peer, as NCCL has where it makes a
            communicator for two; else one for all, as it has for transfers of the whole group's.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[str]],
        placement: Placement,
        cost_of: Callable[[Action], float],
        transfer_ns: float,
        *,
        by_pair: bool,
    ) -> None:
        self.placement, self.cost_of, self.transfer_ns = placement, cost_of, transfer_ns
        self.by_pair = by_pair
        self.rows = [deque(c for c in row if not PER_STAGE.fullmatch(c)) for row in rows]
        self.now_ns = [0.0] * len(rows)
        self.stream_ns: Mapping[tuple[int, int], float] = defaultdict(float)
        self.queues: dict[tuple[int, int], deque[Posted]] = defaultdict(deque)
        self.came_ns: dict[Message, float] = {}

    def makespan(self) -> float:
        """When the last action ends; infinite where they wait for each other."""
        while any([self.issue(device) for device in range(len(self.rows))] + [self.transfer()]):
            pass
        return inf if any(self.rows) else max(self.now_ns)

    def issue(self, device: int) -> bool:
        """Runs a row as far as what it reads has come; whether that was any way."""
        row, start = self.rows[device], len(self.rows[device])
        while row:
            item = parse(row[0])
            if isinstance(item, Transfer):
                post = Posted(item.message, self.now_ns[device])
                self.queues[self.stream(device, item.message)].append(post)
            elif not self.compute(device, item):
                break
            row.popleft()
        return len(row) < start

    def compute(self, device: int, actions: Sequence[Action]) -> bool:
        """Runs what shares a slot; whether all that it reads has come."""
        needed = [m for action in actions if (m := read_by(action, self.placement))]
        if not all(message in self.came_ns for message in needed):
            return False
        start = max([self.now_ns[device], *(self.came_ns[message] for message in needed)])
        self.now_ns[device] = start + sum(map(self.cost_of, actions))
        return True

    def transfer(self) -> bool:
        """Moves each message that is first in the streams of both its ends."""
        moved = False
        for stream in list(self.queues):
            while queue := self.queues[stream]:
                message = queue[0].message
                ends = [self.stream(self.placement.device_of(s), message) for s in two(message)]
                posts = [self.queues[end][0] for end in ends if self.queues[end]]
                if [post.message for post in posts] != [message, message]:
                    break
                free = (self.stream_ns[end] for end in ends)
                come = max(*free, *(post.ready_ns for post in posts)) + self.transfer_ns
                self.came_ns[message] = come
                for end in ends:
                    self.queues[end].popleft()
                    self.stream_ns[end] = come  # type: ignore[index]
                moved = True
        return moved

    def stream(self, device: int, message: Message) -> tuple[int, int]:
        sender, reader = (self.placement.device_of(stage) for stage in two(message))
        return device, sender + reader - device if self.by_pair else -1


def two(message: Message) -> tuple[int, int]:
    """The stages of both ends."""
    return message.stage, message.reader


def unit_cost(action: Action) -> float:
    """A backward takes twice a forward, its halves as long as one."""
    return 2 if action.kind is Kind.B else 1
