"""A backward that fails leaves no graph, which would hold memory and be in the way of captures."""

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch

# Where torch imports this within a step, its circles hold frames of the step.
import torch._dynamo
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pykern
from tests.fake_cuda.fake import FakeCuda


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, of: "Branches") -> Tensor:
        ctx.of = of
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.of.fails[0]:
            raise RuntimeError("planted")
        return gradient, None


class Keeping(torch.autograd.Function):
    """Comes after `Failing` in a backward, since it is called before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: "Branches") -> Tensor:
        ctx.kept = nn.Module()
        of.kept.append(weakref.ref(ctx.kept))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Branches(nn.Linear):
    """Has two branches, one of which raises in the backward as long as it is told to."""

    def __init__(self, width: int, *, fails: bool) -> None:
        super().__init__(width, width)
        # Graph mode does not look into lists.
        self.fails = [fails]
        self.kept: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        kept: Tensor = Keeping.apply(y, self)
        failing: Tensor = Failing.apply(y, self)
        return kept + failing


def alive(of: Branches) -> int:
    return sum(ref() is not None for ref in of.kept)


def assert_freed(devices: Any, at: int, num_before: int, **options: Any) -> None:
    """A step fails behind others, the first two of which look for random draws in a backward."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    branches = layers[at] = Branches(4, fails=False)
    x = torch.randn(8, 4)
    with pykern.Pipeline(
        layers, devices=devices, microbatches=4, loss_fn=mse_loss, **options
    ) as pipe:
        for _ in range(num_before):
            pipe.step(x, target=x)
        branches.fails[0] = True
        gc.collect()
        # Memory is not held until it comes by.
        gc.disable()
        try:
            with suppress(RuntimeError):
                pipe.step(x, target=x)
            assert branches.kept
            assert alive(branches) == 0
        finally:
            gc.enable()
        with pytest.raises(RuntimeError, match="planted"):
            pipe.step(x, target=x)
        branches.fails[0] = False
        pipe.step(x, target=x)


@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "zb_h1"}, {"recompute": "layer"}, {"recompute": "stage"}],
    ids=str,
)
@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_step_that_fails_leaves_no_graph(
    at: int, num_before: int, options: dict[str, Any]
) -> None:
    """The first stage has no leaf, and the second has one."""
    assert_freed("cpu:2", at, num_before, **options)


@pytest.mark.parametrize("num_before", [0, 3])
@pytest.mark.parametrize("at", [0, 2])
def test_a_step_that_fails_on_gpus_leaves_no_graph(
    gpus: FakeCuda, at: int, num_before: int
) -> None:
    assert_freed(["cuda:0", "cuda:1"], at, num_before)
