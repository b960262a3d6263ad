"""Runs that go on from a checkpoint after a process was lost, or with random numbers of each."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pykern
from pykern import checkpoint
from pykern.checkpoint import CheckpointError
from tests import peers
from tests.parallel.reference import layers
from tests.parallel.test_faults import outcomes, step, triggered


def run_with_checkpoints(rank: int, folder: Path, first: int, dies_in: int) -> Any:
    """Saves after each step; process 1 may die in one."""
    pipe, trigger = triggered()
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    file = folder / "run.pykern"
    if first:
        assert checkpoint.load(file, pipe, optimizer) == first
    if rank == 1 and dies_in:
        trigger.calls[4 * dies_in + 2] = lambda: os.kill(os.getpid(), signal.SIGKILL)
    for number in range(first, 8):
        try:
            step(pipe, number, rank)
        except pykern.PeerError:
            return number
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            checkpoint.save(file, pipe, optimizer, extra=number + 1)
    return [p.detach() for p in pipe.parameters()]


def test_a_run_goes_on_bit_for_bit_after_a_process_was_killed_in_a_step(tmp_path: Path) -> None:
    alone, _ = outcomes(2, run_with_checkpoints, tmp_path, 0, 0)
    died_in, dead = outcomes(2, run_with_checkpoints, tmp_path, 0, 5)
    assert died_in == 5
    assert isinstance(dead, peers.Died)
    resumed, other = outcomes(2, run_with_checkpoints, tmp_path, 5, 0)
    assert all(map(torch.equal, resumed, alone))
    assert all(map(torch.equal, other, alone))


def run_with_dropout(rank: int, folder: Path, first: int, last: int) -> Any:
    """Each process draws masks of its own, and saves what they depend on in a file of its own."""
    model = nn.Sequential(*layers(), nn.Dropout(0.5))
    torch.manual_seed(100 + rank)
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=4,
        loss_fn=nn.functional.mse_loss,
        process_group=dist.group.WORLD,
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        file = folder / f"run-{rank}.pykern"
        if first:
            # Process 1 comes with an older file, and is told before it does any harm.
            assert checkpoint.load(folder / "run-0.pykern", pipe, optimizer) == first
            if rank == 1:
                with torch.no_grad():
                    next(pipe.parameters()).zero_()
            with pytest.raises(pykern.PeerError, match="has other parameters"):
                step(pipe, first, rank)
            assert checkpoint.load(file, pipe, optimizer) == first
        for number in range(first, last):
            step(pipe, number, rank)
            optimizer.step()
            optimizer.zero_grad()
        checkpoint.save(file, pipe, optimizer, extra=last)
        return [p.detach() for p in pipe.parameters()]


def test_a_run_with_random_numbers_goes_on_from_a_file_of_each_process(tmp_path: Path) -> None:
    wanted, _ = peers.run(2, run_with_dropout, tmp_path, 0, 6)
    peers.run(2, run_with_dropout, tmp_path, 0, 3)
    for found in peers.run(2, run_with_dropout, tmp_path, 3, 6):
        assert all(map(torch.equal, found, wanted))


def within_accumulation(rank: int, folder: Path, goes_on: bool) -> Any:
    """Three steps before an update; the run may go on from a file that was saved after the second.

    Gradients of the first step are each process's own, of the second those of all.
    """
    file = folder / "run.pykern"
    pipe, _ = triggered()
    with pipe:
        with pipe.no_sync():
            step(pipe, 0, rank)
        with pytest.raises(CheckpointError, match="grads must be False after a step within no_s"):
            checkpoint.save(file, pipe, grads=True)
        checkpoint.save(folder / f"{rank}.pykern", pipe)
        step(pipe, 1, rank)
        if rank == 0:
            checkpoint.save(file, pipe, grads=True)
        dist.barrier()
        if not goes_on:
            step(pipe, 2, rank)
            return [p.grad for p in pipe.parameters()]
    pipe, _ = triggered()
    with pipe:
        checkpoint.load(file, pipe)
        step(pipe, 2, rank)
        return [p.grad for p in pipe.parameters()]


def test_gradients_that_processes_have_summed_are_saved(tmp_path: Path) -> None:
    wanted, _ = peers.run(2, within_accumulation, tmp_path, False)
    for found in peers.run(2, within_accumulation, tmp_path, True):
        assert all(map(torch.equal, found, wanted))
