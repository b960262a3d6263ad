"""The processes that other tests run in."""

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests import peers


def add_up(rank: int, start: int) -> torch.Tensor:
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return value


def die(rank: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def raise_something(rank: int) -> None:
    raise ValueError(f"here {rank}")


def wait_for_ever(rank: int) -> None:
    if rank == 1:
        signal.pause()


def test_processes_reach_each_other() -> None:
    assert [value.item() for value in peers.run(3, add_up, 5)] == [18, 18, 18]


def test_what_they_raise_is_told() -> None:
    with pytest.raises(AssertionError, match=r"(?s)ValueError: here 0.*ValueError: here 1"):
        peers.run(2, raise_something)


def test_one_that_dies_is_told() -> None:
    first, second = peers.outcomes(2, die)
    assert first == 0
    assert isinstance(second, peers.Died)
    assert second.code == -signal.SIGKILL


def test_one_that_hangs_is_told() -> None:
    with pytest.raises(TimeoutError, match="no result from process 1"):
        peers.run(2, wait_for_ever, timeout_s=3)
