"""Contexts that Python drops between `__enter__` and the block, as 3.14 does at an interrupt."""

import threading
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import pykern
from pykern import _C
from tests.runtime.test_forks import run_forks


def enter_and_drop(made: list[AbstractContextManager[object]]) -> None:
    """As the instructions of a `with` do up to the block, which then has the only reference."""
    made.pop().__enter__()


def test_what_a_block_would_put_back_is_put_back_once() -> None:
    calls: list[str] = []
    enter_and_drop([_C.Undo(calls.append, "dropped")])
    assert calls == ["dropped"]
    with _C.Undo(calls.append, "left"):
        pass
    _C.Undo(calls.append, "not entered")
    assert calls == ["dropped", "left"]


def test_what_a_block_would_end_has_ended_with_an_interrupt() -> None:
    lock = threading.Lock()
    ends: list[BaseException | None] = []
    enter_and_drop([_C.Within(int, ends.append, lock)])
    assert [type(end) for end in ends] == [KeyboardInterrupt]
    with _C.Within(int, ends.append, lock):
        assert lock.locked()
    assert ends[1:] == [None]
    assert not lock.locked()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_error_of_putting_back_is_not_raised_beside_the_interrupt() -> None:
    def fails() -> None:
        raise ValueError("planted")

    enter_and_drop([_C.Undo(fails)])


def test_the_next_step_can_claim_the_pipeline() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pykern.Pipeline(layers, devices="cpu:2", microbatches=1) as pipe:
        enter_and_drop([pipe._executor.alone()])
        assert pipe(torch.ones(1, 2)).shape == (1, 2)
        with (
            pipe._executor.alone(),
            pytest.raises(RuntimeError, match="already running a step"),
        ):
            pipe(torch.ones(1, 2))
        assert pipe(torch.ones(1, 2)).shape == (1, 2)


def test_a_step_on_gpus_can_begin() -> None:
    core = _C.StreamExecutor()
    enter_and_drop([core.claim()])
    with core.claim(), pytest.raises(RuntimeError, match="already running a step"):
        core.claim()
    core.close()


@pytest.mark.forks
def test_forks_no_longer_wait() -> None:
    run_forks(
        """
    over = threading.Event()
    def drop():
        pykern._C.HoldForks().__enter__()
        inside.set()
        assert over.wait(60)
    thread = beside(drop)
    assert inside.wait(30)
    assert forked(make_pipeline) == 0
    over.set()
    thread.join()
    """
    )
