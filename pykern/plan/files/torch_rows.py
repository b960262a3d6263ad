"""The rows of a plan as cells of torch's runtime: actions, transfers, reductions and waits."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version

from pykern._C import Costs, Kind, Plan
from pykern.plan.files.transfers import ORDER_COSTS, Slot, Transfer, with_transfers

# The first torch whose runtime waits where its file says so.
WAITS_SINCE = (2, 15)


def torch_waits() -> bool:
    """Whether the runtime of the installed torch needs waits."""
    major, minor, *_ = version("torch").split(".")
    return (int(major), int(minor)) >= WAITS_SINCE


def rows_with_transfers(plan: Plan, costs: Costs = ORDER_COSTS, *, waits: bool) -> list[list[str]]:
    """The cells of every rank, with sends, receives and torch's REDUCE_GRAD.

    Args:
        plan: One that torch can be told of.
        costs: Those by which messages are ordered, see `with_transfers`.
        waits: As for `to_torch_csv`.
    """
    rows = (with_reductions(row, waits=waits) for row in with_transfers(plan, costs))
    return [list(with_waits(row)) if waits else list(map(cell_text, row)) for row in rows]


def cell_text(item: Slot | Transfer | str) -> str:
    """One cell."""
    if isinstance(item, str):
        return item
    if isinstance(item, Transfer) or len(item) == 1:
        return str(item if isinstance(item, Transfer) else item[0])
    return f"({item[0]};{item[1]})OVERLAP_F_B"


def with_reductions(
    row: Sequence[Slot | Transfer], *, waits: bool
) -> Iterator[Slot | Transfer | str]:
    """The row, with REDUCE_GRAD where a stage's gradients are complete and on their way.

    Torch divides the gradients by the number of microbatches there.
    """
    left = Counter(stage for item in row for stage in completed_by(item))
    due: list[str] = []
    for item in row:
        if not isinstance(item, Transfer):
            yield from due
            due.clear()
        yield item
        for stage in completed_by(item):
            left[stage] -= 1
            if left[stage] == 0:
                due += [f"{stage}REDUCE_GRAD", *[f"{stage}WAIT_REDUCE_GRAD"] * waits]
    yield from due


def with_waits(row: Iterable[Slot | Transfer | str]) -> Iterator[str]:
    """The cells of a row, with a wait for each send.

    An output is waited for behind the backward of the same microbatch, whose gradient comes from
    the output's reader: this wait takes no time. Everything else is waited for at the end.
    """
    pending: dict[tuple[int, int], str] = {}
    last: list[str] = []
    for item in row:
        yield cell_text(item)
        if isinstance(item, Transfer):
            down, stage, microbatch = item.message
            if item.sends and down:
                pending[stage, microbatch] = f"{stage}WAIT_SEND_F{microbatch}"
            elif item.sends:
                last.append(f"{stage}WAIT_SEND_B{microbatch}")
        elif not isinstance(item, str):
            for action in item:
                if action.kind in (Kind.B, Kind.I):
                    wait = pending.pop((action.stage, action.microbatch), None)
                    yield from () if wait is None else (wait,)
    yield from pending.values()
    yield from last


def completed_by(item: Slot | Transfer) -> list[int]:
    """The stages whose weight gradients of a microbatch this completes."""
    if isinstance(item, Transfer):
        return []
    return [action.stage for action in item if action.kind in (Kind.B, Kind.W)]
