"""A process that is lost while shared-out state is stepped, clipped or saved, between steps."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import pykern
from pykern import ZeroOptimizer, checkpoint
from tests import peers
from tests.parallel.data_runs import pipeline
from tests.parallel.reference import batch_of, layers

TIMEOUT_S = 4.0


def lost_between(rank: int, what: str, folder: Path) -> Any:
    pipe = pipeline()
    optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.01)
    x, y = batch_of(0, rank, 8)
    pipe.step(x, target=y)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    calls: dict[str, Callable[[], object]] = {
        "step": optimizer.step,
        "clip": lambda: optimizer.clip_grad_norm_(1.0),
        "save": lambda: checkpoint.save(folder / "run.pykern", pipe, optimizer),
    }
    start = time.monotonic()
    with pytest.raises(pykern.PeerError, match="is gone, or has not come within 4 s"):
        calls[what]()
    took = time.monotonic() - start
    with pytest.raises(pykern.PeerError, match="has lost its peers"):
        optimizer.step()
    pipe.close()
    return took, list(folder.iterdir())


@pytest.mark.parametrize("what", ["step", "clip", "save"])
def test_a_process_killed_between_steps_is_noticed_in_time(what: str, tmp_path: Path) -> None:
    (took, files), dead = peers.outcomes(2, lost_between, what, tmp_path, group_timeout_s=TIMEOUT_S)
    assert took < TIMEOUT_S + 3
    assert files == []
    assert isinstance(dead, peers.Died)


def thawed(rank: int) -> Any:
    """A parameter that the optimizer does not have trains from now on, within no_sync."""
    model = torch.nn.Sequential(*layers())
    frozen = next(model.parameters()).requires_grad_(False)
    with pipeline(model) as pipe:
        ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        x, y = batch_of(0, rank, 8)
        with pipe.no_sync():
            pipe.step(x, target=y)
        frozen.requires_grad_(True)
        with pytest.raises(
            RuntimeError,
            match=r"parameters that train must belong to the ZeroOptimizer, got one of shape .* "
            r"that does not",
        ):
            pipe.step(x, target=y)
        frozen.requires_grad_(False)
        return pipe.step(x, target=y)


def test_a_parameter_that_nobody_owns_is_refused_after_no_sync_too() -> None:
    first, second = peers.run(2, thawed)
    assert torch.equal(first, second)
