"""Times of layers, and the promise that measuring leaves no trace."""

import time
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from pykern.partition import partition
from pykern.profile import layer_times_ns


class Slow(nn.Module):
    """Sleeps for a known time in forward and in backward."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.seconds = milliseconds / 1000

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        y = x * 2.0
        if y.requires_grad:
            y.register_hook(lambda _: time.sleep(self.seconds))
        return y


def test_a_layer_costs_its_forward_and_its_backward() -> None:
    layers = [nn.Linear(4, 4), Slow(2), Slow(20)]
    times = layer_times_ns(layers, torch.ones(2, 4))
    assert 4e6 <= times[1] < times[2]
    assert times[2] >= 40e6


def test_time_balance_cuts_where_time_goes() -> None:
    layers = [nn.Linear(4, 4), Slow(1), Slow(1), Slow(20)]
    cut = partition(layers, 2, balance="time", sample=torch.ones(2, 4))
    assert cut.stages == (range(3), range(3, 4))
    assert str(cut).splitlines()[0].endswith("share of time")


def test_measuring_leaves_no_trace() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    model[0].requires_grad_(False)
    sample = torch.randn(4, 1, 4, 4)
    model(sample).sum().backward()
    state, copy_of_sample = deepcopy(model.state_dict()), sample.clone()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    random_state = torch.get_rng_state()
    with torch.no_grad():
        assert all(elapsed > 0 for elapsed in layer_times_ns(list(model), sample))
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert torch.equal(sample, copy_of_sample)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        if parameter.grad is None or gradient is None:
            assert parameter.grad is gradient is None
        else:
            assert torch.equal(parameter.grad, gradient)
    assert model.training


def test_layers_may_pass_nested_tensors_on() -> None:
    class Split(nn.Module):
        def forward(self, x: Tensor) -> dict[str, tuple[Tensor, int]]:
            return {"left": (x + 1.0, 3)}

    class Join(nn.Module):
        def forward(self, parts: dict[str, tuple[Tensor, int]]) -> Tensor:
            return parts["left"][0] * parts["left"][1]

    assert len(layer_times_ns([nn.Linear(2, 2), Split(), Join()], torch.ones(1, 2))) == 3


def test_another_device_is_refused() -> None:
    with pytest.raises(ValueError, match="a tensor is on meta"):
        layer_times_ns([nn.Linear(2, 2, device="meta")], torch.ones(1, 2))
