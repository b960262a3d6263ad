"""Measurements of a model in the middle of its training leave its state as it was."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern

WIDTH, ROWS = 8, 8


class Stateful(nn.Module):
    """Changes all kinds of state in each forward, and draws random numbers of all kinds."""

    mean: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros(()))
        self.calls, self.history, self.options = 0, [0], {"calls": 0}
        self.nested, self.scale = {"inner": [0]}, torch.ones(())
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count.add_(1)
        self.calls += 1
        self.history.append(self.calls)
        self.options["calls"] += 1
        self.nested["inner"].append(self.calls)
        self.scale.mul_(0.9)
        noise = random.random() + np.random.rand() + torch.rand((), generator=self.generator)
        return self.linear(x) * self.scale.clone() + noise + torch.rand(())


class Whole(nn.Module):
    """A forward of its own, around the same, which updates a buffer as well."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))
        self.first, self.stateful = nn.Linear(WIDTH, WIDTH), Stateful()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.stateful(self.first(x)))
        self.center.lerp_(y.detach().mean(0), 0.1)
        return y - self.center.clone()


def chain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Stateful(), nn.Linear(WIDTH, WIDTH))


def photo(model: nn.Module) -> str:
    """All state of the model, and of all generators, as text."""
    [stateful] = [module for module in model.modules() if isinstance(module, Stateful)]
    generators = stateful.generator.get_state().tolist(), torch.get_rng_state().tolist()
    others = random.getstate(), np.random.get_state(legacy=False)
    gradients = [parameter.grad for parameter in model.parameters()]
    held = {name: value for name, value in vars(stateful).items() if name != "generator"}
    return repr((held, list(model.buffers()), generators, others, gradients))


def pipeline(model: nn.Module, **more: Any) -> pykern.Pipeline:
    needs_sample = "balance" in more or not isinstance(model, nn.Sequential)
    sample = {"sample": x()[:2]} if needs_sample else {}
    loss: Any = F.mse_loss
    return pykern.Pipeline(model, devices="cpu:2", microbatches=4, loss_fn=loss, **(sample | more))


def x() -> Tensor:
    return torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


def budget() -> pykern.Budget:
    return pykern.Budget(10**7, sample=x()[:2], target=x()[:2])


# How a pipeline is made, which measures.
MADE: dict[str, Callable[[nn.Module], pykern.Pipeline]] = {
    "as it is": pipeline,
    "time": lambda model: pipeline(model, balance="time"),
    "memory": lambda model: pipeline(model, balance="memory"),
    "auto": lambda model: pipeline(model, balance="time", schedule="auto"),
    "budget": lambda model: pipeline(model, recompute=budget()),
}


@pytest.mark.filterwarnings("ignore:the times of layers differ")
@pytest.mark.parametrize("kind", [chain, Whole])
@pytest.mark.parametrize("way", MADE)
def test_a_pipeline_that_is_made_leaves_the_model_as_it_was(
    way: str, kind: Callable[[], nn.Module]
) -> None:
    model = kind()
    model(x()).sum().backward()
    before = photo(model)
    MADE[way](model).close()
    assert photo(model) == before


# Measurements of a pipeline between two of its steps.
MEASURED: dict[str, Callable[[pykern.Pipeline], object]] = {
    "profile": lambda pipe: pipe.profile(x(), target=x(), steps=1),
    "memory": lambda pipe: pipe.memory(x(), target=x()),
}


@pytest.mark.filterwarnings("ignore:the times of layers differ")
@pytest.mark.parametrize("kind", [chain, Whole])
@pytest.mark.parametrize("way", MEASURED)
def test_a_measured_pipeline_goes_on_as_it_was(way: str, kind: Callable[[], nn.Module]) -> None:
    model = kind()
    with pipeline(model) as pipe:
        pipe.step(x(), target=x())
        before = photo(model)
        MEASURED[way](pipe)
        assert photo(model) == before


class Drops(nn.Module):
    """A forward of its own that asks the model for its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.last(self.first(x)), 0.5, self.training)


@pytest.mark.filterwarnings("ignore:the times of layers differ")
@pytest.mark.parametrize("kind", [chain, Drops])
@pytest.mark.parametrize("way", MEASURED)
def test_a_measured_pipeline_stays_in_eval_mode(way: str, kind: Callable[[], nn.Module]) -> None:
    """The model's own mode was that of the measurement, so its dropout went on."""
    model = kind()
    with pipeline(model) as pipe:
        pipe.eval()
        MEASURED[way](pipe)
        assert not any(module.training for module in (pipe, *model.modules()))
        if kind is Drops:
            with torch.no_grad():
                assert torch.equal(pipe(x()), pipe(x()))


class Shrinks(nn.Module):
    """A forward of its own that writes to a tensor in an attribute of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x))
        return y * self.scale.mul_(0.9).clone()


@pytest.mark.filterwarnings("ignore:the times of layers differ")
@pytest.mark.parametrize("way", MEASURED)
def test_tensors_of_the_model_itself_are_as_before(way: str) -> None:
    model = Shrinks()
    with pipeline(model) as pipe:
        pipe.step(x(), target=x())
        before = model.scale.item()
        MEASURED[way](pipe)
        assert model.scale.item() == before


@pytest.mark.filterwarnings("ignore:the times of layers differ")
@pytest.mark.parametrize("way", MADE)
def test_tensors_of_the_model_itself_are_as_before_it_had_a_pipeline(way: str) -> None:
    model = Shrinks()
    MADE[way](model).close()
    assert model.scale.item() == 1


def test_what_a_kernel_adds_to_is_as_before() -> None:
    class Head(nn.Linear):
        weight: Any

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(self.add)
            return y

        def add(self, gradient: Tensor) -> None:
            self.weight.main_grad.add_(gradient.sum())

    head = Head(WIDTH, WIDTH)
    head.weight.main_grad = torch.zeros(WIDTH, WIDTH)
    with pipeline(nn.Sequential(nn.Linear(WIDTH, WIDTH), head)) as pipe:
        pipe.step(x(), target=x())
        before = head.weight.main_grad.clone()
        pipe.profile(x(), target=x(), steps=1)
        assert before.any()
        assert torch.equal(head.weight.main_grad, before)
