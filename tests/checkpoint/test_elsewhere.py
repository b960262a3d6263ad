"""Files of optimizers whose state is elsewhere: those of plain ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import HostOptimizer, checkpoint
from pykern.checkpoint import CheckpointError
from tests.loop.loops import WIDTH, mlp, pipeline


def train(pipe: pykern.Pipeline, optimizer: torch.optim.Optimizer, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(pipe.parameters()).dtype
    for _ in range(3):
        x = torch.randn(6, WIDTH, generator=generator).to(dtype)
        optimizer.zero_grad()
        pipe.step(x, target=x)
        optimizer.step()
    return [parameter.detach().clone() for parameter in pipe.parameters()]


def on_host(pipe: pykern.Pipeline, lr: float) -> torch.optim.Optimizer:
    return HostOptimizer(pipe, torch.optim.AdamW, lr=lr)


def plainly(pipe: pykern.Pipeline, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=lr)


def through_a_file(
    path: Path, first: Any, second: Any, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """The results of a run that goes on, and of one that goes on from its file."""
    torch.manual_seed(3)
    with pipeline(mlp().to(dtype)) as pipe, pipeline(mlp().to(dtype), schedule="gpipe") as other:
        optimizer = first(pipe, 0.01)
        train(pipe, optimizer, 1)
        checkpoint.save(path, pipe, optimizer)
        wanted = train(pipe, optimizer, 2)
        again = second(other, 5.0)
        # The state that it has by now goes.
        train(other, again, 9)
        checkpoint.load(path, other, again)
        return train(other, again, 2), wanted


@pytest.mark.parametrize(
    ("first", "second"), [(on_host, on_host), (on_host, plainly), (plainly, on_host)]
)
def test_either_goes_on_with_the_others_file(tmp_path: Path, first: Any, second: Any) -> None:
    found, wanted = through_a_file(tmp_path / "run", first, second, torch.float32)
    assert all(map(torch.equal, found, wanted))


def test_masters_of_half_precision_are_in_the_file(tmp_path: Path) -> None:
    found, wanted = through_a_file(tmp_path / "run", on_host, on_host, torch.bfloat16)
    assert all(map(torch.equal, found, wanted))


def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with pipeline(mlp()) as pipe:
        optimizer = HostOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        train(pipe, optimizer, 1)
        checkpoint.save(tmp_path / "run", pipe, optimizer)
    with pipeline(mlp(), schedule="gpipe") as other:
        again = HostOptimizer(other, torch.optim.SGD, lr=0.01, momentum=0.9)
        before = train(other, again, 2)
        with pytest.raises(
            CheckpointError, match="optimizer must be of the class that was saved, 'AdamW', got SGD"
        ):
            checkpoint.load(tmp_path / "run", other, again)
        assert all(map(torch.equal, other.parameters(), before))
        frozen: list[nn.Parameter] = list(other.parameters())[1:]
        fewer = HostOptimizer(other, torch.optim.AdamW, frozen, lr=0.01)
        with pytest.raises(CheckpointError, match="only in the file"):
            checkpoint.load(tmp_path / "run", other, fewer)
