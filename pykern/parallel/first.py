"""What one process finds, for instance by measuring, and all others take from it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .errors import PeerError, shown
from .groups import control_group, give_back, meeting
from .waiting import Pending

Found = TypeVar("Found")


@dataclass(frozen=True)
class _Outcome:
    """What a process that looked has found, or what went wrong."""

    found: Any = None
    failure: str = ""


def of_first(groups: Sequence[ProcessGroup], find: Callable[[], Found]) -> Found:
    """What the first of all processes finds; it alone looks, and the others wait for it.

    To be called by all processes of the groups, which are the dimensions of a mesh: the first is
    the one with rank 0 in each of them.

    Args:
        groups: that this process is in; none, and it looks itself.
        find: what it finds can be pickled.

    Raises:
        BaseException: this is the first process, and `find` raised it.
        PeerError: the first process could not, or one is gone, or has not come in time.
    """
    outcome, error = _Outcome(), None
    if all(group.rank() == 0 for group in groups):
        try:
            outcome = _Outcome(find())
        except BaseException as raised:
            error, outcome = raised, _Outcome(failure=shown(raised))
    for group in groups:
        outcome = _told(outcome, group)
    if error is not None:
        raise error
    if outcome.failure:
        raise PeerError(f"the first process has failed before its first step: {outcome.failure}")
    found: Found = outcome.found
    return found


def _told(outcome: _Outcome, group: ProcessGroup) -> _Outcome:
    """That of the group's first process."""
    data = pickle.dumps(outcome)
    with meeting(group):
        control = control_group(group)
        try:
            size = _of_first(torch.tensor([len(data)]), control)
            buffer = bytearray(data) if group.rank() == 0 else bytearray(int(size))
            _of_first(torch.frombuffer(buffer, dtype=torch.uint8), control)
        finally:
            give_back([control])
    told: _Outcome = pickle.loads(buffer)
    return told


def _of_first(values: Tensor, group: ProcessGroup) -> Tensor:
    """Those of the group's first process, in place."""
    work = dist.broadcast(values, group=group, group_src=0, async_op=True)
    Pending(work, on_host=True).wait()
    return values
