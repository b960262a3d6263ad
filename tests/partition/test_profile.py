"""Times of layers, and the promise that measuring leaves no trace."""

import time
from copy import deepcopy
from functools import partial
from typing import Any, Self

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.partition import partition, profile
from pykern.partition.profile import MOST_ROUNDS, disagreement, layer_bytes, layer_times_ns
from tests.runtime.hard_layers import Threads
from tests.support.notes import Notes


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


def test_halves_that_disagree_are_measured_longer_and_warned_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that only the runs move: every other round takes twice as long."""
    runs = 0

    def run(layer: nn.Module, sample: Any) -> tuple[int, Any]:
        nonlocal runs
        runs += 1
        return 100 * (1 + (runs + 1) // 2 % 2), sample

    monkeypatch.setattr(profile, "_run", run)
    layers = [nn.Identity(), nn.Identity()]
    told = f"differ by 67% between two halves of {MOST_ROUNDS}"
    with pytest.warns(UserWarning, match=told) as warned:
        assert layer_times_ns(layers, torch.ones(1)) == [150, 150]
    assert runs == 2 * (1 + MOST_ROUNDS)
    runs = 0
    with pytest.warns(UserWarning, match=told) as of_a_cut:
        partition(layers, 1, balance="time", sample=torch.ones(1))
    # They are at the user's lines, not at those of pykern.
    assert {one.filename for one in (*warned, *of_a_cut)} == {__file__}
    assert disagreement([[100, 200]] * 4) == 0


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
    with pytest.raises(
        ValueError, match="tensors must be on the CPU for times to be measured, got one on meta"
    ):
        layer_times_ns([nn.Linear(2, 2, device="meta")], torch.ones(1, 2))


class Modes(nn.Module):
    """Notes in which modes it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.dropout = nn.Dropout(0.5)
        self.notes = Notes()

    @property
    def seen(self) -> set[tuple[bool, bool, bool]]:
        return self.notes.seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((self.training, self.norm.training, torch.is_grad_enabled()))
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.parametrize("balance", ["time", "memory"])
@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_layers_are_measured_as_in_training(balance: Any, around: Any) -> None:
    """A model as it comes from a library is in eval mode, and so it was measured."""
    layers = [Modes().eval(), Modes().eval()]
    sample = torch.randn(4, 2)
    states = [deepcopy(layer.state_dict()) for layer in layers]
    random_state = torch.get_rng_state()
    with around():
        partition(layers, 2, balance=balance, sample=sample)
    for layer, state in zip(layers, states, strict=True):
        assert layer.seen == {(True, True, True)}
        assert not any(module.training for module in layer.modules())
        assert all(parameter.grad is None for parameter in layer.parameters())
        assert all(torch.equal(layer.state_dict()[name], state[name]) for name in state)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_modes_that_somebody_has_chosen_are_kept() -> None:
    layers = [Modes(), Modes().eval()]
    layers[0].norm.eval()
    layer_times_ns(layers, torch.randn(4, 2))
    assert layers[0].seen == {(True, False, True)}
    assert layers[1].seen == {(False, False, True)}
    assert [module.training for module in layers[0].modules()] == [True, True, False, True]


class Frozen(Modes):
    """Its normalisation stays in eval mode."""

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        return self


def test_what_stays_in_eval_mode_in_training_does_so_when_measured() -> None:
    layer = Frozen().eval()
    layer_times_ns([layer], torch.randn(4, 2))
    assert layer.seen == {(True, False, True)}
    assert not layer.training


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Modes() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.training else x * 2


def test_a_recorded_model_is_measured_as_in_training() -> None:
    model, sample = Whole().eval(), torch.randn(4, 2)
    for layer in model.layers:
        assert isinstance(layer, Modes)
        layer.seen.clear()
    with torch.no_grad():
        options: dict[str, Any] = {"devices": "cpu:2", "microbatches": 2, "balance": "time"}
        pipe = pykern.Pipeline(model, sample=sample, **options)
    with pipe:
        assert pipe.partition.balance == "time"
        assert not any(module.training for module in model.modules())
        # As it was recorded, and as it was measured.
        assert {seen for layer in model.layers for seen in layer.seen} == {  # type: ignore[union-attr]
            (False, False, False),
            (True, True, True),
        }
        assert torch.equal(pipe(sample), torch.cat([model(sample[:2]), model(sample[2:])]))


def test_layers_are_measured_with_the_threads_of_a_worker() -> None:
    layers = [Threads() for _ in range(4)]
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pykern.Pipeline(
            layers, devices="cpu:2", microbatches=2, balance="time", sample=torch.ones(1, 2)
        ) as pipe:
            assert all(layer.seen == {2} for layer in layers)
            assert torch.get_num_threads() == 4
            pipe(torch.ones(4, 2))
            assert all(layer.seen == {2} for layer in layers)
    finally:
        torch.set_num_threads(threads)


class Table(nn.Module):
    """Multiplies by a matrix that does not train, and which its backward reads."""

    table: Tensor

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        if is_buffer:
            self.register_buffer("table", torch.ones(64, 64))
        else:
            self.table = torch.ones(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


@pytest.mark.parametrize("is_buffer", [True, False])
def test_what_a_layer_has_already_is_not_kept_for_the_backward(is_buffer: bool) -> None:
    layers = [nn.Linear(64, 64), Table(is_buffer)]
    assert layer_bytes(layers, torch.ones(4, 64)) == [4 * 64 * 4, 0]


def test_parameters_in_one_storage_are_not_kept_for_the_backward() -> None:
    layers = [nn.Linear(64, 64) for _ in range(3)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    nn.utils.vector_to_parameters(torch.ones(3 * 64 * 65), parameters)
    assert layers[1].weight.storage_offset() > 0
    assert layer_bytes(layers, torch.ones(4, 64)) == [4 * 64 * 4] * 3


def test_an_estimate_counts_the_same_bytes() -> None:
    layers = [nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)]
    x = torch.ones(4, 8)
    found = pykern.estimate(
        layers,
        devices=2,
        microbatches=2,
        sample=x,
        target=x,
        loss_fn=nn.functional.mse_loss,
        balance="memory",
    )
    real = partition(layers, 2, balance="memory", sample=x)
    assert found.partition.layer_costs == real.layer_costs


class Sum(nn.Linear):
    """A first layer of two arguments."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + y)


def test_a_sample_may_have_several_arguments() -> None:
    """The first layer got them as one."""
    x, layers = torch.ones(2, 4), [Sum(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    make: Any = partial(pykern.Pipeline, layers, devices="cpu:2", loss_fn=F.mse_loss)
    for balance in ("time", "memory"):
        with make(microbatches=1, balance=balance, sample=(x, x)) as pipe:
            assert sum(pipe.partition.costs) > 0
    with make(microbatches=1, recompute=pykern.Budget(1e9, (x, x), x)) as pipe:
        pipe.step(x, x, target=x)
    step: Any = {"devices": 2, "microbatches": 1, "loss_fn": F.mse_loss, "target": x}
    found = pykern.estimate(layers, sample=(x, x), **step)
    alone = pykern.estimate([nn.Linear(4, 4), *layers[1:]], sample=x, **step)
    assert found.devices[1] == alone.devices[1]
