"""Checkpoints of sharded models: one file, for any number of shards."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import checkpoint
from pykern.checkpoint import CheckpointError, dcp
from pykern.tensors.dtensor import whole
from tests import peers
from tests.parallel.sharded import (
    assert_near,
    batch_of,
    layers,
    mesh_of,
    pipeline,
    whole_parameters,
)
from tests.support.comparison import assert_same_tensors

pytestmark = pytest.mark.slow

# A parameter of these runs goes at most the learning rate, 0.01, in each of three updates; what
# rounding changes in gradients, and in which way AdamW divides them, changes far less of that.
NEAR = 3 * 0.01 * 2**-10


def made(pipe: pykern.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=0.01)


def steps(pipe: pykern.Pipeline, optimizer: torch.optim.Optimizer, first: int, end: int) -> None:
    for number in range(first, end):
        x, y = batch_of(number)
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()


def saved(_: int, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Saves after three steps and half of an accumulation; the parameters then, and after seven."""
    with pipeline(mesh_of(2)) as pipe:
        optimizer = made(pipe)
        steps(pipe, optimizer, 0, 3)
        x, y = batch_of(3)
        pipe.step(x, target=y)
        checkpoint.save(path, pipe, optimizer, grads=True, extra={"step": 3})
        # All of them find the file when they are back.
        assert path.exists()
        then = whole_parameters(pipe)
        steps(pipe, optimizer, 4, 7)
        return then, whole_parameters(pipe)


def resumed(_: int, path: Path, size: int) -> dict[str, Tensor]:
    with pipeline(mesh_of(size), devices="cpu:1", schedule="gpipe") as pipe:
        optimizer = made(pipe)
        assert checkpoint.load(path, pipe, optimizer) == {"step": 3}
        steps(pipe, optimizer, 4, 7)
        return whole_parameters(pipe)


def test_a_run_goes_on_with_any_number_of_shards(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    (then, wanted), other = peers.run(2, saved, path)
    assert_same_tensors(then, other[0])
    for found in peers.run(2, resumed, path, 2):
        assert_same_tensors(found, wanted)
    for found in peers.run(4, resumed, path, 4):
        assert_near(found, wanted, NEAR)
    # One process, and no tensor parallel.
    model = nn.Sequential(*layers())
    with pykern.Pipeline(
        model, devices="cpu:3", microbatches=4, loss_fn=nn.functional.mse_loss
    ) as pipe:
        optimizer = made(pipe)
        checkpoint.load(path, pipe, optimizer)
        assert_same_tensors(dict(pipe.named_parameters()), then)
        steps(pipe, optimizer, 4, 7)
        assert_near(whole_parameters(pipe), wanted, NEAR)


def from_a_whole_run(_: int, path: Path) -> dict[str, Tensor]:
    with pipeline(mesh_of(2)) as pipe:
        optimizer = made(pipe)
        checkpoint.load(path, pipe, optimizer)
        state: Any = {
            name: {key: whole(value) for key, value in optimizer.state[parameter].items()}
            for name, parameter in pipe.named_parameters()
        }
        assert all(entries["step"] == 3 for entries in state.values())
        moments = {name: entries["exp_avg"] for name, entries in state.items()}
        return {**whole_parameters(pipe), **{f"{name} moment": m for name, m in moments.items()}}


def test_a_whole_run_can_be_sharded(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    with pykern.Pipeline(
        nn.Sequential(*layers()), devices="cpu:2", microbatches=4, loss_fn=nn.functional.mse_loss
    ) as pipe:
        optimizer = made(pipe)
        steps(pipe, optimizer, 0, 3)
        checkpoint.save(path, pipe, optimizer)
        named = list(pipe.named_parameters())
        moments = {f"{name} moment": optimizer.state[p]["exp_avg"] for name, p in named}
    for found in peers.run(2, from_a_whole_run, path):
        assert_same_tensors(found, {**dict(named), **moments})


def cannot_write(_: int, folder: Path) -> list[str]:
    messages = []
    with pipeline(mesh_of(2)) as pipe:
        for save in (
            lambda: checkpoint.save(folder / "not there" / "run.ckpt", pipe),
            lambda: dcp.to_dcp(folder / "dcp", pipe),
        ):
            try:
                save()
            except (OSError, CheckpointError) as error:
                messages.append(f"{type(error).__name__}: {error}")
    return messages


def test_who_cannot_write_tells_the_others(tmp_path: Path) -> None:
    first, second = peers.run(2, cannot_write, tmp_path)
    assert first[0].startswith("FileNotFoundError")
    assert second[0].startswith("CheckpointError: the first of the processes with shards")
    assert list(tmp_path.iterdir()) == []
    for of_dcp in (first[1], second[1]):
        assert of_dcp.startswith(
            "CheckpointError: model must be whole in each process, got one sharded"
        )
