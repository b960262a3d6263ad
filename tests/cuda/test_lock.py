"""The thread that calls the actions of a step on GPUs, and the interpreter's lock."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from pykern import _C
from pykern.plan import Kind
from pykern.schedules import one_f_one_b
from tests.fake_cuda.fake import FakeCuda

PLAN = one_f_one_b(2, 64)


class Other:
    """A thread that wants the lock all the time, and counts how often it has had it."""

    def __init__(self) -> None:
        self.turns = 0
        self._ends = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends:
            self.turns += 1
            time.sleep(0)

    def end(self) -> None:
        self._ends = True
        self._thread.join()


@pytest.fixture
def other() -> Iterator[Other]:
    """The lock is taken from no thread, but only given up."""
    interval = sys.getswitchinterval()
    made = Other()
    sys.setswitchinterval(1000)
    yield made
    sys.setswitchinterval(interval)
    made.end()


def run(fake: FakeCuda, call: Callable[[int], None]) -> Sequence[object]:
    program = _C.StreamProgram(PLAN, _C.Lanes([(0, 0, 1), (1, 0, 1)]))
    executor = _C.StreamExecutor()
    callers = {gpu: fake.stream(gpu) for gpu in range(2)}
    calls = {kind: [call] * 2 for kind in (Kind.F, Kind.B)}
    with executor.claim():
        failures = executor.run(program, calls, callers, replay=False, traced=False)
    executor.close()
    return failures


def test_the_calling_thread_calls_actions_and_seldom_loses_the_lock(
    fake_cuda: FakeCuda, other: Other
) -> None:
    """It gives the lock back between actions, and takes it again before the other has woken."""
    seen: list[tuple[int, int]] = []
    assert not run(fake_cuda, lambda _: seen.append((threading.get_ident(), other.turns)))
    assert len(seen) == PLAN.num_actions
    assert {thread for thread, _ in seen} == {threading.get_ident()}
    assert len(set(seen)) < PLAN.num_actions / 4
