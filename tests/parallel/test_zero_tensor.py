"""State shared out where every process has shards: 2 x 2 processes of two devices each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import pykern
from pykern import ZeroOptimizer, checkpoint
from tests import peers
from tests.parallel.sharded import (
    assert_near,
    batch_of,
    layers,
    pipeline,
    whole_parameters,
)
from tests.support.comparison import assert_same_tensors

pytestmark = pytest.mark.slow
DTYPE = torch.float64


def cube(rank: int, shared_out: bool, path: Path) -> tuple[dict[str, Tensor], int]:
    """Four steps with clipping, a file after the second; the parameters, and how much is kept."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh["dp"].get_local_rank()
    with pipeline(mesh["tp"], layers(DTYPE), process_group=mesh["dp"]) as pipe:
        optimizer: Any
        if shared_out:
            optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=0.01)
        else:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        for number in range(4):
            x, y = batch_of(number, mine, (6, 9)[mine], DTYPE)
            pipe.step(x, target=y)
            if shared_out:
                optimizer.clip_grad_norm_(0.1)
            else:
                pykern.clip_grad_norm_(pipe.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if number == 1 and shared_out:
                checkpoint.save(path, pipe, optimizer, extra=2)
        moments = [of["exp_avg"] for of in optimizer.state.values()]
        return whole_parameters(pipe), sum(map(_num_local, moments))


def _num_local(tensor: Any) -> int:
    return tensor.to_local().numel() if hasattr(tensor, "to_local") else tensor.numel()


def resumed(rank: int, path: Path) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = mesh["dp"].get_local_rank()
    with pipeline(mesh["tp"], layers(DTYPE), process_group=mesh["dp"]) as pipe:
        optimizer = ZeroOptimizer(pipe, torch.optim.AdamW, lr=5.0)
        for number in range(checkpoint.load(path, pipe, optimizer), 4):
            x, y = batch_of(number, mine, (6, 9)[mine], DTYPE)
            pipe.step(x, target=y)
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        return whole_parameters(pipe)


def test_shards_whose_state_is_shared_out(tmp_path: Path) -> None:
    path = tmp_path / "run"
    found = peers.run(4, cube, True, path)
    wanted = peers.run(4, cube, False, path)
    for (parameters, _), (others, _) in zip(found, wanted, strict=True):
        assert_same_tensors(parameters, others)
    for first, second in ((0, 2), (1, 3)):
        assert found[first][1] + found[second][1] == wanted[first][1]
    for parameters in peers.run(4, resumed, path):
        assert_same_tensors(parameters, found[0][0])
    # One process and the plain model go on as well.
    model = nn.Sequential(*layers(DTYPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5.0)
    for number in range(checkpoint.load(path, model, optimizer), 4):
        batches = [batch_of(number, rank, (6, 9)[rank], DTYPE) for rank in range(2)]
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        nn.functional.mse_loss(model(x), y).backward()
        pykern.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    named = {name: value.detach() for name, value in model.named_parameters()}
    assert_near(found[0][0], named, 2 * 0.01 * 2**-20)


def of_whole_parameters(rank: int) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with pipeline(mesh["tp"], layers(DTYPE), process_group=mesh["dp"]) as pipe:
        matrices = [parameter for parameter in pipe.parameters() if parameter.dim() == 2]
        for kind in (torch.optim.Adafactor, torch.optim.Muon):
            with pytest.raises(
                TypeError,
                match="optimizer_class must step each value of a parameter alone beside "
                f"tensor_parallel, got {kind.__name__}",
            ):
                ZeroOptimizer(pipe, kind, matrices)


def test_optimizers_of_whole_parameters_are_refused() -> None:
    """They would take the rows and columns of a shard, with other updates."""
    peers.run(2, of_whole_parameters)
