"""Layers that torch.jit has compiled give the bits of the layers that they were made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern

WIDTH = 4
X, Y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """It has parameters, a buffer, and running statistics within."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offset", torch.ones(WIDTH))
        self.offset: Tensor

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.linear(x) + self.offset)
        return normed


def traced(block: nn.Module) -> nn.Module:
    """Traced in a mode in which statistics stay."""
    found = torch.jit.trace(block.eval(), X)
    assert isinstance(found, nn.Module)
    return found


def three_steps(model: nn.Sequential, options: dict[str, Any]) -> list[Tensor]:
    """The losses, the last gradients, and the buffers by name."""
    options = {"microbatches": 2, "loss_fn": F.mse_loss, "balance": [2, 1], **options}
    with pykern.Pipeline(model, devices="cpu:2", **options) as pipe:
        losses = []
        for _ in range(3):
            model.zero_grad()
            losses.append(pipe.step(X, target=Y))
    gradients = {name: held.grad for name, held in model.named_parameters()}
    named = sorted([*gradients.items(), *model.named_buffers()])
    return [*losses, *(tensor for _, tensor in named if tensor is not None)]


# Told as a FutureWarning since torch 2.14, and otherwise in Python 3.14.
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": "stage"}, {"recompute": "layer"}, {"schedule": "zb_h1"}],
    ids=["plain", "stage", "layer", "zb_h1"],
)
@pytest.mark.parametrize("compiled", [torch.jit.script, traced])
def test_a_layer_of_torchscript_has_the_bits_of_its_original(
    compiled: Callable[[nn.Module], nn.Module], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    first, block, last = nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)
    if compiled is traced:
        block.eval()
    model = nn.Sequential(first, block, last)
    scripted = nn.Sequential(
        copy.deepcopy(first), compiled(copy.deepcopy(block)), copy.deepcopy(last)
    )
    wanted, found = three_steps(model, options), three_steps(scripted, options)
    assert len(found) == len(wanted) == 3 + 8 + 4
    assert all(map(torch.equal, found, wanted))


def dropped(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, True)


class Forks(nn.Module):
    """Draws in a task of its own."""

    def forward(self, x: Tensor) -> Tensor:
        future: torch.jit.Future[Tensor] = torch.jit.fork(dropped, x)
        return torch.jit.wait(future)


class Stays(nn.Module):
    """Draws the same numbers as `Forks`."""

    def forward(self, x: Tensor) -> Tensor:
        return dropped(x)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("options", [{}, {"recompute": "stage"}], ids=str)
def test_a_script_that_forks_draws_as_one_that_does_not(options: dict[str, Any]) -> None:
    linear = nn.Linear(WIDTH, WIDTH)
    losses = []
    for block in (Stays(), torch.jit.script(Forks())):
        torch.manual_seed(0)
        model = nn.Sequential(copy.deepcopy(linear), block, copy.deepcopy(linear))
        losses.append(three_steps(model, options))
    assert all(map(torch.equal, *losses))
