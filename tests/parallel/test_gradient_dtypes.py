"""Parameters in bfloat16 whose gradients are float32: sums, failures and differences."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pykern
from tests import peers
from tests.parallel import sharded
from tests.parallel.data_runs import pipeline

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ones(1), "grad_dtype"), reason="this torch has no grad_dtype"
)


class Skips(nn.Module):
    """A layer that is left out, or fails, in one process."""

    def __init__(self, what: str, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.what = what if rank else ""

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "fails":
            raise ValueError("planted")
        return x if self.what == "skips" else self.layer(x)


def made(rank: int, what: str = "", **options: Any) -> pykern.Pipeline:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), Skips(what, rank)).to(torch.bfloat16)
    if not (rank and what == "differs"):
        for parameter in model.parameters():
            parameter.grad_dtype = torch.float32
    return pipeline(model, reduction="sum", **options)


def step(rank: int, pipe: pykern.Pipeline) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(2, 8, 4, generator=generator).bfloat16()
    pipe.step(x, target=y)
    return {name: p.grad for name, p in pipe.named_parameters()}


def gradients(rank: int, what: str, together: bool) -> dict[str, Tensor | None]:
    with made(rank, what, process_group=dist.group.WORLD if together else None) as pipe:
        return step(rank, pipe)


@pytest.mark.parametrize("what", ["", "skips"])
def test_sums_are_in_float32(what: str) -> None:
    first, second = peers.run(2, gradients, what, False)
    for found in peers.run(2, gradients, what, True):
        for name, gradient in found.items():
            assert gradient.dtype == torch.float32
            other = 0.0 if second[name] is None else second[name]
            assert torch.equal(gradient, first[name] + other), name


def shared_out(rank: int, what: str) -> list[tuple[torch.dtype, Tensor]]:
    with made(rank, what) as pipe:
        pykern.ZeroOptimizer(pipe, torch.optim.SGD, lr=0.1)
        return [(g.dtype, g) for g in step(rank, pipe).values() if g is not None]


def test_shared_out_sums_are_in_float32() -> None:
    first, second = peers.run(2, gradients, "skips", True)
    found = [one for of_process in peers.run(2, shared_out, "skips") for one in of_process]
    assert len(found) == len(first) == len(second) == 4
    assert all(dtype == torch.float32 for dtype, _ in found)
    for gradient in first.values():
        assert any(torch.equal(gradient, other) for _, other in found)


def test_a_failure_in_one_process_is_told() -> None:
    first, second = peers.outcomes(2, gradients, "fails", True)
    assert isinstance(first, pykern.PeerError)
    assert "process 1 of the group has failed in this step: ValueError: planted" in str(first)
    assert isinstance(second, ValueError)


def test_processes_whose_gradients_have_other_types_are_refused() -> None:
    for error in peers.outcomes(2, gradients, "differs", True):
        assert isinstance(error, pykern.PeerError)
        assert "got ones that differ in the parameters" in str(error)


def in_shards(_: int) -> list[torch.dtype | None]:
    layers = sharded.layers(torch.bfloat16)
    for parameter in nn.ModuleList(layers).parameters():
        parameter.grad_dtype = torch.float32
    with sharded.pipeline(sharded.mesh_of(2), layers) as pipe:
        x, y = sharded.batch_of(0)
        pipe.step(x.bfloat16(), target=y.bfloat16())
        return [None if p.grad is None else p.grad.dtype for p in pipe.parameters()]


@pytest.mark.slow
def test_gradients_of_shards_are_in_float32() -> None:
    for dtypes in peers.run(2, in_shards):
        assert set(dtypes) == {torch.float32}
