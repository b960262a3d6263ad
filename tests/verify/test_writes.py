"""Layers that write their own parameters in each forward, verified and measured."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.support.writing_layers import Decays, Renewed

WIDTH = 8
X = torch.randn(8, WIDTH)


class DecaysFrozen(Decays):
    """Writes a weight that does not train, as a momentum encoder does."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.weight.requires_grad_(False)


KINDS = [Decays, Renewed, DecaysFrozen]


def layers(kind: Callable[..., nn.Module]) -> nn.Sequential:
    # In the last stage each microbatch ends before the next begins, as in the plain model.
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), kind(WIDTH, WIDTH))


class WithForward(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.layers = layers(kind)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def pipeline(model: nn.Module, **options: Any) -> pykern.Pipeline:
    settings: dict[str, Any] = {"devices": "cpu:2", "microbatches": 4, "loss_fn": F.mse_loss}
    if isinstance(model, WithForward):
        settings["sample"] = X[:2]
    return pykern.Pipeline(model, **(settings | options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [layers, WithForward])
def test_a_verified_step_writes_parameters_once(
    make: Callable[..., nn.Module], kind: type[nn.Linear]
) -> None:
    def after(verify: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = make(kind)
        with pipeline(model, verify=verify) as pipe:
            losses = [pipe.step(X, target=X) for _ in range(2)]
            outputs = [pipe(X)]
        return [*losses, *outputs, *model.state_dict().values()]

    assert all(map(torch.equal, after(True), after(False)))


def test_after_an_error_parameters_are_as_after_the_step() -> None:
    class Drawn(Decays):
        def forward(self, x: Tensor) -> Tensor:
            numbers.append(0)
            return super().forward(x) * len(numbers)

    numbers: list[int] = []
    model = layers(Drawn)
    weight, expected = model[3].get_parameter("weight"), torch.empty(WIDTH, WIDTH)
    expected.copy_(weight.detach())
    with pipeline(model, verify=True) as pipe, pytest.raises(pykern.VerifyError):
        pipe.step(X, target=X)
    for _ in range(4):
        expected.mul_(0.9)
    assert torch.equal(weight, expected)


def _made(model: nn.Module, **options: Any) -> None:
    pipeline(model, **options).close()


MEASUREMENTS: dict[str, Callable[[nn.Module], object]] = {
    "time": lambda model: _made(model, balance="time", sample=X[:2]),
    "memory": lambda model: _made(model, balance="memory", sample=X[:2]),
    "Budget": lambda model: _made(
        model, recompute=pykern.Budget(2**30, sample=X[:2], target=X[:2])
    ),
    "profile": lambda model: pipeline(model).profile(X, target=X, steps=2),
    "pipe.memory": lambda model: pipeline(model).memory(X, target=X),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("measurement", MEASUREMENTS)
def test_a_measurement_puts_parameters_back(measurement: str, kind: type[nn.Linear]) -> None:
    model = layers(kind)
    before = {name: (held.clone(), held.data_ptr()) for name, held in model.state_dict().items()}
    MEASUREMENTS[measurement](model)
    for name, held in model.state_dict().items():
        assert torch.equal(held, before[name][0])
        assert held.data_ptr() == before[name][1]


def test_a_report_on_cuts_puts_parameters_back() -> None:
    model = WithForward(Decays)
    before = [held.clone() for held in model.parameters()]
    pykern.explain_cut(model, X[:2])
    assert all(map(torch.equal, model.parameters(), before))
