"""Sizes that the processes do not divide: refused in plain shards, the plain model's otherwise."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import pykern
from pykern import checkpoint
from pykern.parallel.tensor.shards import find_shards
from tests import peers
from tests.parallel.sharded import (
    Block,
    assert_near,
    batch_of,
    mesh_of,
    pipeline,
    plain_step,
    train,
    whole_parameters,
)
from tests.parallel.test_tensor import bound_of
from tests.support.comparison import assert_same_tensors

COLUMNS, ROWS = ColwiseParallel(), RowwiseParallel()
WHOLE = ColwiseParallel(output_layouts=Replicate())
KEPT = ColwiseParallel(use_local_output=False)


@pytest.mark.parametrize(
    ("layer", "style"),
    [
        (nn.Linear(4, 7), COLUMNS),
        (nn.Linear(4, 7), ColwiseParallel(output_layouts=Shard(-1))),
        (nn.Embedding(4, 7), COLUMNS),
        (nn.Linear(4, 7), RowwiseParallel(output_layouts=Shard(-1))),
    ],
)
def test_plain_shards_of_unequal_sizes_are_refused(layer: nn.Module, style: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(7, 2))
    with pytest.raises(
        ValueError,
        match="the features of 1 must be a multiple of 2, the number of processes, to be handed "
        r"on in plain shards, got 7\. Pad it",
    ):
        find_shards(model, [list(model)], {"1": style}, 2)
    assert find_shards(model, [list(model)], {"1": style}, 7)


@pytest.mark.parametrize("style", [WHOLE, KEPT, ROWS])
def test_other_shards_of_unequal_sizes_are_not_refused(style: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 7))
    assert find_shards(model, [list(model)], {"1": style}, 2)


def uneven_layers() -> list[nn.Module]:
    torch.manual_seed(7)
    blocks = [Block(8) for _ in range(4)]
    for block in blocks:
        block.up, block.down = nn.Linear(8, 7), nn.Linear(7, 8)
    chain = [nn.Linear(4, 8), *blocks, nn.Linear(8, 2)]
    return [layer.double() for layer in chain]


UNEVEN = {
    "1.up": WHOLE,
    "2.down": RowwiseParallel(input_layouts=Replicate()),
    "[34].up": KEPT,
    "[34].down": ROWS,
}


def uneven_steps(_: int, path: Path) -> dict[str, Tensor]:
    """Four steps, the last two by a pipeline that goes on from the first's checkpoint."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    two_steps(mesh, path, 0)
    return two_steps(mesh, path, 2)


def two_steps(mesh: DeviceMesh, path: Path, first: int) -> dict[str, Tensor]:
    dp, tp = mesh["dp"], mesh["tp"]
    rows = (slice(5), slice(5, None))[dp.get_local_rank()]
    options = {"tensor_parallel": (tp, UNEVEN), "process_group": dp, "recompute": "layer"}
    with pipeline(tp, uneven_layers(), **options) as pipe:
        optimizer = pykern.ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1, momentum=0.9)
        if first:
            checkpoint.load(path, pipe, optimizer)

        def step(number: int) -> Tensor:
            x, y = batch_of(first + number, dtype=torch.float64)
            return pipe.step(x[rows], target=y[rows])

        train(step, optimizer, 2)
        checkpoint.save(path, pipe, optimizer)
        return whole_parameters(pipe)


@pytest.mark.slow
def test_shards_of_unequal_sizes_train_as_the_plain_model_does(tmp_path: Path) -> None:
    model = nn.Sequential(*uneven_layers())
    train(
        lambda number: plain_step(model, *batch_of(number, dtype=torch.float64)),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        4,
    )
    first, *others = peers.run(4, uneven_steps, tmp_path / "run.ckpt")
    for other in others:
        assert_same_tensors(other, first)
    assert_near(first, whole_parameters(model), bound_of(torch.float64))


SEQUENCES = {
    "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "1.norm": SequenceParallel(),
    "1.up": ColwiseParallel(input_layouts=Shard(1)),
    "1.down": ROWS,
}


def odd_sequence(_: int) -> str:
    model = [nn.Embedding(12, 8), Block(8), nn.Linear(8, 12)]
    mesh = mesh_of(2)
    options = {"tensor_parallel": (mesh, SEQUENCES), "loss_fn": F.mse_loss, "balance": [2, 1]}
    with pipeline(mesh, model, **options) as pipe:
        try:
            pipe(torch.zeros(4, 5, dtype=torch.int64))
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.slow
def test_an_odd_sequence_in_plain_shards_is_refused() -> None:
    for message in peers.run(2, odd_sequence):
        assert message.startswith(
            "dimension 1 of the output of 0 must be a multiple of 2, the number of processes, to "
            "be handed on in plain shards, got 5"
        )
