"""Plans without an end, cut into the parts that steps run."""

from collections import Counter
from collections.abc import Callable

import pytest

from pykern import schedules
from pykern._C import WorkerProgram
from pykern.plan import Action, Kind, Plan, with_updates
from pykern.plan.parts import Parts, PlanPart

SIZES = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (3, 8), (4, 4), (4, 16), (7, 9), (8, 8)]


def pipedream(num_devices: int) -> Callable[[int], Plan]:
    return lambda num_microbatches: schedules.pipedream(num_devices, num_microbatches)


def two_buffered(num_devices: int, group: int) -> Callable[[int], Plan]:
    return lambda num_microbatches: schedules.pipedream_2bw(num_devices, num_microbatches, group)


def ran(parts: Parts, num_batches: int) -> list[list[Action]]:
    """The part of each row that is run, with microbatches counted from the beginning."""
    rows: list[list[Action]] = [[] for _ in range(parts.plan.num_devices)]

    def run(part: PlanPart, shift: int) -> None:
        for row, actions in zip(rows, part.rows, strict=True):
            row += [Action(a.kind, a.stage, a.microbatch + shift) for a in actions]

    for number in range(num_batches):
        position, shift = parts.alike(number)
        run(parts.windows[position], shift)
    position, shift = parts.alike(num_batches - 1)
    run(parts.rests[position], shift)
    return rows


@pytest.mark.parametrize(("num_devices", "microbatches"), SIZES)
@pytest.mark.parametrize("delayed", [False, True])
def test_parts_one_after_another_are_the_plan_of_the_whole_run(
    num_devices: int, microbatches: int, delayed: bool
) -> None:
    make = two_buffered(num_devices, microbatches) if delayed else pipedream(num_devices)
    parts = Parts(make, microbatches)
    assert parts.group == (microbatches if delayed else 1)
    for num_batches in (1, 2, 3, 4, 7):
        rows = ran(parts, num_batches)
        assert [tuple(row) for row in rows] == list(make(num_batches * microbatches).rows)


@pytest.mark.parametrize(("num_devices", "microbatches"), SIZES)
def test_parts_can_run_and_each_begins_with_the_first_stage_at_a_new_batch(
    num_devices: int, microbatches: int
) -> None:
    parts = Parts(pipedream(num_devices), microbatches)
    for number, part in enumerate(parts.windows):
        WorkerProgram.part(part.plan, part.begins, part.ends)
        forwards = Counter(a.microbatch for a in part.rows[0] if a.kind is Kind.F)
        first = number * microbatches
        assert forwards == Counter(range(first, first + microbatches))
        # And the last has not been left a batch behind.
        behind = [a.microbatch for a in part.rows[-1] if a.kind is Kind.F]
        assert len(set(behind)) > 0
        assert first - num_devices < behind[0] <= first
    for rest in parts.rests:
        WorkerProgram.part(rest.plan, rest.begins, rest.ends)


def test_numbers_in_flight_are_apart_modulo_the_slots() -> None:
    parts = Parts(two_buffered(4, 4), 4)
    for number in range(9):
        position, shift = parts.alike(number)
        part = parts.windows[position]
        used = {a.microbatch + shift for row in part.rows for a in row}
        used |= set(range(number * 4, number * 4 + 4))
        assert max(used) - min(used) < parts.num_slots


def test_devices_lose_little_between_two_parts() -> None:
    """With the costs of the simulator, where a backward takes twice as long as a forward."""
    for num_devices, microbatches in ((2, 8), (4, 8), (8, 32)):
        rows = Parts(pipedream(num_devices), microbatches).windows[-1].rows
        assert makespan(rows) <= 1.09 * 3 * microbatches
        # A flush of each batch costs more.
        assert makespan(rows) < 3 * (microbatches + num_devices - 1)


def makespan(rows: list[tuple[Action, ...]]) -> int:
    """The time of a part, all devices beginning together; F takes 1, B takes 2, U nothing."""
    length = {Kind.F: 1, Kind.B: 2, Kind.U: 0}
    here = {action for row in rows for action in row}
    ends: dict[Action, int] = {}
    position, free = [0] * len(rows), [0] * len(rows)
    while any(at < len(row) for at, row in zip(position, rows, strict=True)):
        before = list(position)
        for device, row in enumerate(rows):
            while position[device] < len(row):
                action = row[position[device]]
                toward = {Kind.F: -1, Kind.B: 1, Kind.U: 0}[action.kind]
                stage = action.stage + toward
                needed = set[Action]()
                if toward and 0 <= stage < len(rows):
                    needed = {Action(action.kind, stage, action.microbatch)} & here
                if not needed <= ends.keys():
                    break
                start = max([free[device], *(ends[each] for each in needed)])
                ends[action] = free[device] = start + length[action.kind]
                position[device] += 1
        assert position != before
    return max(free)


def late(num_microbatches: int) -> Plan:
    """The first group of two reads one version with its first forward, another with its second."""
    return with_updates(schedules.one_f_one_b(2, num_microbatches), group=2, delay=0)


def early(num_microbatches: int) -> Plan:
    """An update before the backward of the first microbatch of its group."""
    row = []
    for first in range(0, num_microbatches, 2):
        kinds = [(Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.U, 1), (Kind.B, 0)]
        row += [Action(kind, 0, first + number) for kind, number in kinds]
    placement = schedules.gpipe(1, 1).placement
    return Plan(placement, num_microbatches, [row])


def uneven(num_microbatches: int) -> Plan:
    """The second stage updates for groups of its own."""
    rows = [list(row) for row in schedules.pipedream(2, num_microbatches).rows]
    kept = [a for a in rows[1] if a.kind is not Kind.U or a.microbatch % 2]
    return Plan(schedules.gpipe(2, 1).placement, num_microbatches, [rows[0], kept])


def changing(num_microbatches: int) -> Plan:
    """Every eighth backward comes late."""
    (row,) = (list(row) for row in schedules.pipedream(1, num_microbatches).rows)
    for first in range(0, num_microbatches - 2, 8):
        at = row.index(Action(Kind.B, 0, first))
        backward, update = row[at : at + 2]
        del row[at : at + 2]
        at = row.index(Action(Kind.F, 0, first + 1)) + 1
        row[at:at] = [backward, update]
    return Plan(schedules.gpipe(1, 1).placement, num_microbatches, [row])


@pytest.mark.parametrize(
    ("make", "microbatches", "message"),
    [
        (pipedream(4), 3, "at least the number of devices, 4, .* got 3"),
        (
            two_buffered(2, 4),
            6,
            "microbatches must be a multiple of the group after which the schedule updates "
            "weights, got 6 and groups of 4",
        ),
        (lambda count: schedules.one_f_one_b(2, count), 4, "got 4 and no microbatches"),
        (late, 4, "in a group of 2 microbatches, got 0F4 with a newer one|got 0F"),
        (early, 2, "updates must come after all backwards of their group of 2, got 0U1 before one"),
        (
            uneven,
            4,
            "the schedule must update weights after every .* microbatches, got updates of "
            "stage 1 after 2, 4, 6, 8, ...",
        ),
        (
            changing,
            4,
            "the schedule must do the same with each batch of 4 microbatches to run without "
            "a flush, got one that does not",
        ),
    ],
)
def test_schedules_that_cannot_go_on_are_refused(
    make: Callable[[int], Plan], microbatches: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Parts(make, microbatches)
