"""A plan as the CSV of torch.distributed.pipelining: a line for each rank, a cell for each action.

"2F0", "2B0", "2I0", "2W0" mean the same as in pykern, "(2F3;1B0)OVERLAP_F_B" is a pair that shares
its slot, an empty cell is a bubble. There is no header: counts and placement follow from the cells.

Files with sends and receives have two forms: from version 2.15 on, torch's runtime needs a wait for
each send and each REDUCE_GRAD, and an older torch cannot read waits.
"""

import csv
import io
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import NoReturn

from pykern._C import Action, Kind, Placement, Plan, check
from pykern.plan.files.proved import MAX_ACTIONS, proved_plan, require_count
from pykern.plan.files.torch_rows import cell_text, rows_with_transfers, torch_waits
from pykern.plan.files.transfers import (
    Message,
    ReadItem,
    Slot,
    Transfer,
    require_paired,
    slots_of,
)

KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)
# The most devices that a placement takes; a line is a device.
MAX_DEVICES = 1 << 16
# The limit for actions, transfers and bubbles together.
MAX_CELLS = 2 * MAX_ACTIONS

ACTION = re.compile(r"[0-9]+[FBIW][0-9]+")
PAIR = re.compile(r"\(([0-9]+F[0-9]+);([0-9]+[BI][0-9]+)\)OVERLAP_F_B")
TRANSFER = re.compile(r"([0-9]{1,5})(SEND|RECV)_([FB])([0-9]{1,8})")
# Torch's actions once per stage, for parameters that are sharded or replicated over ranks.
PER_STAGE = re.compile(r"[0-9]{1,5}(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)")
# The end of a send, for its sender alone.
WAIT = re.compile(r"[0-9]{1,5}WAIT_SEND_[FB][0-9]{1,8}")


def to_torch_csv(plan: Plan, *, transfers: bool = False, waits: bool | None = None) -> str:
    """The plan as torch's runtime loads it.

    Args:
        plan: A plan that passes `check`. Two more rules of torch's runtime, which the file cannot
            express, are not checked: as many ranks as devices, and ascending microbatches on the
            last stage.
        transfers: Whether to write sends, receives and torch's REDUCE_GRAD, the form that torch
            calls "compute_comms"; otherwise torch's "compute_only" is written.
        waits: Whether to write waits with the transfers, which torch 2.15 and newer need and older
            versions cannot read; None for the form of the installed torch.

    Returns:
        Lines as Python's csv writes them, each ending in a carriage return and a line feed.

    Raises:
        PlanError: The plan breaks a rule.
        ValueError: The plan has replicas, slices, or actions of a kind that torch lacks.
    """
    check(plan)
    require_sayable(plan)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    if transfers:
        waits = torch_waits() if waits is None else waits
        writer.writerows(rows_with_transfers(plan, waits=waits))
    else:
        writer.writerows(map(cell_text, row) for row in slots_of(plan))
    return text.getvalue()


def require_sayable(plan: Plan, reader: str = "torch's CSV", advice: str = "; use .json") -> None:
    """Refuses a plan that torch's format cannot express."""
    for name, number in (
        ("replicas", plan.placement.num_replicas),
        ("slices", plan.num_slices),
    ):
        if number > 1:
            raise ValueError(f"{name} of the plan must be 1 for {reader}, got {number}{advice}")
    for device, row in enumerate(plan.rows):
        for position, action in enumerate(row):
            if action.kind not in KINDS:
                raise ValueError(
                    f"actions must be F, B, I or W for {reader}, got {action} at position "
                    f"{position} of device {device}{advice}"
                )


def from_torch_csv(text: str) -> Plan:
    """The plan that the text holds, whether this project or torch has written it.

    Args:
        text: The CSV, with or without sends and receives. If there are any, they must be exactly
            the ones that the plan needs. They are left out of the result, as are bubbles, waits,
            and torch's actions once per stage.

    Returns:
        The checked plan.

    Raises:
        ValueError: The text does not hold a plan; the message names line, cell and value.
        PlanError: The plan breaks a rule.
    """
    require_cells(text)
    rows = [Row(line, cells) for line, cells in enumerate(lines_of(text), start=1)]
    require_count("actions", sum(row.num_actions for row in rows), MAX_ACTIONS)
    placement = placement_of(rows)
    plan = proved_plan(
        placement,
        1 + max((row.last_microbatch for row in rows), default=0),
        [row.actions() for row in rows],
        1,
        [row.pairs() for row in rows],
    )
    if any(row.has_transfers for row in rows):
        require_paired(rows, placement)
    return plan


def require_cells(text: str) -> None:
    """Refuses more cells than a file may hold, and transfers that have no actions."""
    num_cells = text.count(",") + text.count("\n") + 1
    require_count("cells", num_cells, MAX_CELLS)
    num_waits = text.count("WAIT_SEND_")
    num_transfers = text.count("SEND_") - num_waits + text.count("RECV_")
    if num_waits > num_transfers:
        raise ValueError(
            f"waits must be at most {num_transfers}, the number of transfers, got {num_waits}"
        )
    num_others = num_cells - num_transfers - num_waits
    if num_transfers > 2 * num_others:
        raise ValueError(
            f"transfers must be at most two for each of {num_others} other cells, got "
            f"{num_transfers}"
        )


def lines_of(text: str) -> Iterator[list[str]]:
    """The cells, line by line, because all cells at once take many times the text's memory."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for number, cells in enumerate(reader, start=1):
            if number > MAX_DEVICES:
                raise ValueError(
                    f"lines must be at most {MAX_DEVICES}, one for each device, got line {number}"
                )
            yield cells
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from error


class Row:
    """The contents of a line, without bubbles and without cells that occur once for a stage.

    Iteration makes the cells one by one, because a file may have millions.

    Args:
        line: The number of the line.
        texts: The cells of the line.

    Attributes:
        num_actions: The number of actions; a pair counts twice.
        last_microbatch: The last microbatch of the actions; 0 for a line without actions.
        has_transfers: Whether the line has sends or receives.

    Raises:
        ValueError: A cell is not part of the format.
    """

    def __init__(self, line: int, texts: Sequence[str]) -> None:
        self._line = line
        self._numbers = array("I")
        self._items: list[Slot | Transfer] = []
        self.num_actions = self.last_microbatch = 0
        self.has_transfers = False
        for number, text in enumerate(texts, start=1):
            if text == "" or PER_STAGE.fullmatch(text) or WAIT.fullmatch(text):
                continue
            try:
                self._add(number, parse(text))
            except ValueError as error:
                raise ValueError(f"line {line}, cell {number}: {error}") from error

    def _add(self, number: int, item: Slot | Transfer) -> None:
        self._numbers.append(number)
        self._items.append(item)
        if isinstance(item, Transfer):
            self.has_transfers = True
            return
        self.num_actions += len(item)
        for action in item:
            self.last_microbatch = max(self.last_microbatch, action.microbatch)

    def __iter__(self) -> Iterator[ReadItem]:
        for number, item in zip(self._numbers, self._items, strict=True):
            yield ReadItem(self._line, number, item)

    def slots(self) -> Iterator[Slot]:
        """The actions and pairs of the line."""
        return (item for item in self._items if not isinstance(item, Transfer))

    def actions(self) -> list[Action]:
        """The actions of the line, one by one."""
        return [action for slot in self.slots() for action in slot]

    def pairs(self) -> list[int]:
        """Positions of the first actions of pairs."""
        found, position = [], 0
        for slot in self.slots():
            if len(slot) == 2:
                found.append(position)
            position += len(slot)
        return found


def parse(text: str) -> Slot | Transfer:
    """One cell."""
    if ACTION.fullmatch(text):
        return (Action.parse(text),)
    if pair := PAIR.fullmatch(text):
        return Action.parse(pair[1]), Action.parse(pair[2])
    if transfer := TRANSFER.fullmatch(text):
        stage, down, sends = int(transfer[1]), transfer[3] == "F", transfer[2] == "SEND"
        sender = stage if sends else stage + (-1 if down else 1)
        return Transfer(sends, Message(down, sender, int(transfer[4])))
    raise ValueError(f"a cell must be like '2F0', got {text[:40]!r}")


def placement_of(rows: Sequence[Row]) -> Placement:
    """The placement: each stage is on the device whose line holds the actions of the stage."""
    device_of: dict[int, int] = {}
    for device, row in enumerate(rows):
        for stage in {action.stage for slot in row.slots() for action in slot}:
            if device_of.setdefault(stage, device) != device:
                refuse_stage(stage, device_of[stage], row)
    num_stages = 1 + max(device_of, default=-1)
    if missing := sorted(set(range(num_stages)) - device_of.keys()):
        raise ValueError(
            f"each of {num_stages} stages must have an action, got none for stage {missing[0]}"
        )
    return Placement(len(rows), [device_of[stage] for stage in range(num_stages)])


def refuse_stage(stage: int, owner: int, row: Row) -> NoReturn:
    """Raises ValueError if a stage is on a second line."""
    where = next(
        cell.where
        for cell in row
        if not isinstance(cell.item, Transfer) and any(a.stage == stage for a in cell.item)
    )
    raise ValueError(
        f"{where}: stage {stage} must be on line {owner + 1}, where it began, got an action of it "
        "here"
    )
