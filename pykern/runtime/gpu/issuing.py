"""The threads that issue a step: the caller's, or one for each lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from ... import _C
from ...plan import Kind
from ...torch_private import set_multithreading
from ..caller_state import CallerState
from ..driver import Failure
from ..settings_kept import settings_kept
from .cuda import Gpus
from .ring_transport import StreamCallback

# Whether the caller of a step calls its actions, or threads do.
Issuing = Literal["caller", "threads"]


class Issuer:
    """Has the actions of steps called, by their caller one after another or by threads.

    Args:
        num_threads: one for each lane, to call the lane's actions until `close`; 0 for the caller.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = _C.Issuers(num_threads) if num_threads else None

    def issue(
        self,
        core: _C.StreamExecutor,
        gpus: Gpus,
        program: _C.StreamProgram,
        calls: Mapping[Kind, Sequence[StreamCallback]],
        *,
        traced: bool,
    ) -> list[Failure]:
        """Issues a step after the current streams; returns the failures."""
        if self._threads is not None:
            carry = _carry(CallerState(1), gpus)
            by = partial(core.run_by, self._threads, program, calls, carry)
            return settings_kept(partial(by, gpus.callers(), traced))
        callers = gpus.callers()
        with gpus.step():
            return core.run(program, calls, callers, replay=False, traced=traced)

    def close(self) -> None:
        """Ends the threads."""
        if self._threads is not None:
            self._threads.close()


def _carry(state: CallerState, gpus: Gpus) -> Callable[[], Callable[[], None]]:
    """Gives a thread the state of the step's caller, and the lanes' streams."""

    def begin() -> Callable[[], None]:
        undo = state()
        # A flag of each thread, without which autograd has backwards run on threads of its own.
        set_multithreading(False)
        gpus.enter_streams()
        return undo

    return begin
