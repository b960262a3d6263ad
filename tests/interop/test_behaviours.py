"""Rows of the table of docs/from-torchgpipe.md that have no other test, for both names."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pykern.interop import fairscale, torchgpipe

WIDTH = 4
NAMES = {"torchgpipe": torchgpipe.GPipe, "fairscale": fairscale.Pipe}


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), *more, nn.Linear(WIDTH, WIDTH))


@pytest.fixture(params=NAMES)
def make(request: pytest.FixtureRequest) -> Any:
    made = []

    def make(module: nn.Sequential, **options: Any) -> Any:
        half = len(module) // 2
        given: dict[str, Any] = {"devices": ["cpu", "cpu"], "chunks": 3} | options
        made.append(NAMES[request.param](module, [half, len(module) - half], **given))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Raises(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ArithmeticError("here"), KeyboardInterrupt()], ids=repr)
def test_what_a_layer_raises_reaches_the_caller(make: Any, error: BaseException) -> None:
    raising = Raises(error)
    model = make(layers(raising))
    with pytest.raises(type(error)) as caught:
        model(torch.ones(6, WIDTH))
    assert caught.value is error
    raising.error = None
    assert model(torch.ones(6, WIDTH)).shape == (6, WIDTH)


def test_more_chunks_than_rows(make: Any) -> None:
    module = layers()
    plain = copy.deepcopy(module)
    model = make(module, chunks=8)
    x = torch.randn(3, WIDTH)
    assert torch.equal(model(x), torch.cat([plain(row) for row in x.split(1)]))


def test_no_forward_runs_again_without_gradients(make: Any) -> None:
    module, calls = layers(), []
    module[0].register_forward_hook(lambda *_: calls.append(1))
    model = make(module, checkpoint="always")
    with torch.no_grad():
        model(torch.ones(6, WIDTH))
    assert len(calls) == 3


def test_a_hook_sees_a_gradient_once_with_checkpoints_too(make: Any) -> None:
    module, seen = layers(), []
    model = make(module, checkpoint="always")
    weight = module[0].weight
    assert isinstance(weight, nn.Parameter)
    weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    model(torch.randn(6, WIDTH)).sum().backward()
    assert weight.grad is not None
    assert [torch.equal(gradient, weight.grad) for gradient in seen] == [True]
    (found,) = torch.autograd.grad(model(torch.ones(6, WIDTH)).sum(), [weight])
    assert found.shape == weight.shape


class Pair(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"both": [x, x * 2], "name": "pair"}


class Sum(nn.Module):
    def forward(self, pair: dict[str, Any]) -> Tensor:
        total: Tensor = sum(pair["both"])
        return total


def test_any_tree_goes_from_layer_to_layer(make: Any) -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), Pair(), Sum(), nn.Tanh())
    model = make(module)
    x = torch.randn(6, WIDTH)
    assert torch.equal(model(x), torch.cat([module(part) for part in x.split(2)]))


def test_a_second_backward_and_second_derivatives_are_refused(make: Any) -> None:
    model = make(layers())
    loss = model(torch.randn(6, WIDTH)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="has run already"):
        loss.backward()
    x = torch.randn(6, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph must be False"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_copies_are_refused(make: Any) -> None:
    model = make(layers())
    for take in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cop|pickle"):
            take(model)
