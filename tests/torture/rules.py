"""The rules of docs/plan-rules.md in plain Python, written anew: they share nothing with the core.

Slow and obvious on purpose, but for what a small plan lets be small.
"""

from collections import Counter
from itertools import product

from .raw import Raw, RawAction

KINDS = ("F", "R", "B", "I", "W", "U", "COPY_F", "COPY_B", "REDUCE", "OFFLOAD", "LOAD")
_MOST_CELLS, _MOST_SLICES, _MOST_STAGES = 1 << 24, 256, 65536


def is_table(raw: Raw) -> bool:
    """Whether there can be a `Plan` of it, right or wrong."""
    num_stages = raw.num_stages
    counts = raw.num_devices, len(raw.replicas), num_stages
    cells = num_stages * raw.num_microbatches * raw.num_slices
    return (
        all(1 <= count <= _MOST_STAGES for count in counts)
        and all(len(replica) == num_stages for replica in raw.replicas)
        and all(0 <= d < raw.num_devices for replica in raw.replicas for d in replica)
        and raw.num_microbatches >= 1
        and 1 <= raw.num_slices <= _MOST_SLICES
        and cells <= _MOST_CELLS
        and len(raw.rows) == raw.num_devices
        and (not raw.overlaps or len(raw.overlaps) == raw.num_devices)
        and all(map(_are_pairs, raw.overlaps, raw.rows))
        and all(_fits(*action) for row in raw.rows for action in row)
    )


def _fits(_: str, stage: int, microbatch: int, part: int) -> bool:
    """Whether the numbers are those of an `Action`."""
    return stage < _MOST_STAGES and microbatch < 1 << 32 and part < _MOST_SLICES


def _are_pairs(starts: list[int], row: list[RawAction]) -> bool:
    """Positions that ascend, with room for the second action of each pair."""
    free = 0
    for start in starts:
        if start < free or start + 1 >= len(row):
            return False
        free = start + 2
    return True


def broken(raw: Raw) -> set[str]:
    """The rules that the plan breaks; empty where it can run.

    Whether its order lets it end (P006, P007) is asked only of plans that break no other.
    """
    actions = [action for row in raw.rows for action in row]
    rules: set[str] = set()
    if not all(_in_range(raw, action) for action in actions):
        # Then nothing else can be said: the action belongs nowhere.
        return {"P001"}
    if any(action[0] in ("COPY_F", "COPY_B") for action in actions):
        rules.add("P002")
    there = set(actions)
    if len(there) < len(actions):
        rules.add("P003")
    for device, row in enumerate(raw.rows):
        if any(raw.device_of(action) != device for action in row):
            rules.add("P004")
    if any(count > 1 for count in Counter(_backwards(there)).values()):
        rules.add("P008")
    if not _complete(raw, there):
        rules.add("P005")
    for row, starts in zip(raw.rows, raw.overlaps, strict=bool(raw.overlaps)):
        if not all(_overlap(row[start], row[start + 1]) for start in starts):
            rules.add("P009")
    return rules or _order(raw, there)


def _in_range(raw: Raw, action: RawAction) -> bool:
    kind, stage, microbatch, part = action
    if kind == "REDUCE":
        return stage < raw.num_stages and microbatch == part == 0
    return stage < raw.num_stages and microbatch < raw.num_microbatches and part < raw.num_slices


def _backwards(there: set[RawAction]) -> list[tuple[int, int, int]]:
    """The cell of each whole backward, and of each that is there in halves."""
    whole = [action[1:] for action in there if action[0] == "B"]
    return whole + list({action[1:] for action in there if action[0] in ("I", "W")})


def _complete(raw: Raw, there: set[RawAction]) -> bool:
    kinds = {action[0] for action in there}
    trains = bool(kinds & {"B", "I", "W"})
    cells = product(range(raw.num_stages), range(raw.num_microbatches), range(raw.num_slices))
    return (
        (trains or "R" not in kinds)
        and all(_complete_cell(there, cell, trains=trains) for cell in cells)
        and (
            "REDUCE" not in kinds
            or all(("REDUCE", stage, 0, 0) in there for stage in range(raw.num_stages))
        )
    )


def _complete_cell(there: set[RawAction], cell: tuple[int, int, int], *, trains: bool) -> bool:
    """A forward, a whole backward or both halves, and what goes out comes back."""
    has = {kind: (kind, *cell) in there for kind in KINDS}
    halves = has["I"] and has["W"]
    lonely = has["I"] != has["W"] and not has["B"]
    return (
        has["F"]
        and not lonely
        and (halves or has["B"] or not trains)
        and has["OFFLOAD"] == has["LOAD"]
    )


def _overlap(first: RawAction, second: RawAction) -> bool:
    return first[0] == "F" and second[0] in ("B", "I") and first[2] != second[2]


def needed(raw: Raw, action: RawAction) -> list[RawAction]:
    """The actions of the plan that the action waits for."""
    kind, stage, microbatch, part = action
    cell = stage, microbatch, part
    if kind == "REDUCE":
        every = product(("B", "W"), range(raw.num_microbatches), range(raw.num_slices))
        return [(last, stage, m, j) for last, m, j in every]
    if kind in ("B", "I"):
        after = product(("B", "I"), ((stage + 1, microbatch, part), (stage, microbatch, part + 1)))
        here: list[RawAction] = [(before, *cell) for before in ("F", "R", "LOAD")]
        return here + [(backward, *other) for backward, other in after]
    others: dict[str, list[RawAction]] = {
        "F": [("F", stage - 1, microbatch, part), ("F", stage, microbatch, part - 1)],
        "R": [("F", *cell), ("LOAD", *cell)],
        "OFFLOAD": [("F", *cell)],
        "LOAD": [("OFFLOAD", *cell)],
        "W": [("I", *cell)],
        "U": [
            ("B", stage, microbatch, 0),
            ("W", stage, microbatch, 0),
            ("REDUCE", stage, 0, 0),
        ],
    }
    return others[kind]


def _order(raw: Raw, there: set[RawAction]) -> set[str]:
    """Runs the rows by trial; what is left says which rule is broken."""
    starts = [set(each) for each in raw.overlaps] or [set() for _ in raw.rows]
    reached = [0] * len(raw.rows)
    left = set(there)
    progress = True
    while progress:
        progress = False
        for device, row in enumerate(raw.rows):
            place = reached[device]
            while place < len(row):
                slot = row[place : place + (2 if place in starts[device] else 1)]
                if any(one in left for action in slot for one in needed(raw, action)):
                    break
                left.difference_update(slot)
                place += len(slot)
                progress = True
            reached[device] = place
    if not left:
        return set()
    return {"P006" if any(map(_stands_early, [raw] * len(raw.rows), raw.rows)) else "P007"}


def _stands_early(raw: Raw, row: list[RawAction]) -> bool:
    """Whether an action of the row stands in front of what it needs of the row."""
    behind: set[RawAction] = set()
    for action in reversed(row):
        if any(one in behind for one in needed(raw, action)):
            return True
        behind.add(action)
    return False
