"""Results that one process finds, for instance by measuring, and all others take from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed import ProcessGroup

from ...plan.files.typed_json import from_text, to_text
from .errors import PeerError, shown, understanding
from .groups import control_group, give_back, meeting
from .texts import text_of

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class _Outcome:
    """The result of the process that searched, as JSON, or its failure."""

    found: str = ""
    failure: str = ""


def of_first(
    groups: Sequence[ProcessGroup], find: Callable[[], _Answer], kind: type[_Answer]
) -> _Answer:
    """The result of the first process, which alone calls `find` while the others wait for it.

    All processes of the groups must call this function. The groups are the dimensions of a mesh;
    the first process is the one with rank 0 in each of them.

    Args:
        groups: the groups that this process is in; without groups, this process calls `find`.
        find: called in the first process.
        kind: the type of the result, which `typed_json` must be able to read.

    Raises:
        BaseException: this is the first process, and `find` raised it.
        PeerError: `find` failed in the first process; or a process is gone, has not come in time,
            or sent another kind of message.
    """
    if not groups:
        return find()
    outcome, error = _Outcome(), None
    if all(group.rank() == 0 for group in groups):
        try:
            outcome = _Outcome(to_text(find()))
        except BaseException as raised:
            error, outcome = raised, _Outcome(failure=shown(raised))
    for group in groups:
        outcome = _told(outcome, group)
    if error is not None:
        raise error
    if outcome.failure:
        raise PeerError(f"the first process has failed before its first step: {outcome.failure}")
    with understanding("the first process"):
        return from_text(kind, outcome.found)


def _told(outcome: _Outcome, group: ProcessGroup) -> _Outcome:
    """The outcome of the group's first process."""
    with meeting(group):
        control = control_group(group)
        try:
            text = text_of(to_text(outcome), control, 0)
        finally:
            give_back([control])
    with understanding("the first process"):
        return from_text(_Outcome, text)
