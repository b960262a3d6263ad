"""A small model whose blocks are sharded over processes, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import pykern
from pykern.tensors.dtensor import whole
from tests.support.pipelines import small
from tests.support.plain_step import Seed, by_microbatch, rows_of

NUM_MICROBATCHES = 4
# As the user knows the modules: layers by number.
STYLES: Mapping[str, Any] = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}


class Block(nn.Module):
    """x + down(tanh(up(norm(x)))), whose `up` is sharded by columns and `down` by rows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def layers(dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """The same in every process: eight layers of width 8, the first takes 4 values, the last 2."""
    torch.manual_seed(7)
    chain = [nn.Linear(4, 8), *(Block(8) for _ in range(6)), nn.Linear(8, 2)]
    return [layer.to(dtype) for layer in chain]


def batch_of(
    step: int, dp_rank: int = 0, rows: int = 10, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The batch of a tensor-parallel group in a step; the microbatches have not all one size."""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    x = torch.randn(rows, 4, generator=generator, dtype=dtype)
    return x, torch.randn(rows, 2, generator=generator, dtype=dtype)


def mesh_of(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def pipeline(
    mesh: DeviceMesh, model: Sequence[nn.Module] | None = None, **options: Any
) -> pykern.Pipeline:
    usual = {"microbatches": NUM_MICROBATCHES, "tensor_parallel": (mesh, STYLES)}
    return small(nn.Sequential(*(layers() if model is None else model)), **(usual | options))


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """All of them, by name, gathered from the processes that have shards."""
    return {name: whole(parameter).clone() for name, parameter in model.named_parameters()}


def train(
    step: Callable[[int], Tensor], optimizer: torch.optim.Optimizer, num_steps: int = 10
) -> list[Tensor]:
    """The losses of as many steps."""
    losses = []
    for number in range(num_steps):
        optimizer.zero_grad()
        losses.append(step(number))
        optimizer.step()
    return losses


def plain_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Adds the plain model's gradients, microbatch by microbatch; returns the loss."""
    rows = rows_of(len(x), NUM_MICROBATCHES)
    parts = list(zip(x.split(rows), y.split(rows), strict=True))

    def loss_of(index: int, _: Seed) -> Tensor:
        given, target = parts[index]
        return nn.functional.mse_loss(model(given), target)

    return by_microbatch(model, rows, loss_of)


def assert_near(one: Mapping[str, Tensor], other: Mapping[str, Tensor], bound: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value - other[name]).abs().max() <= bound, name
