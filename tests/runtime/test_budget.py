"""A memory budget: what is chosen runs, holds, and keeps every bit."""

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern
from bench.live import counted_bytes
from pykern.budget import Budget
from pykern.models.gpt import gpt, next_token_loss
from pykern.plan import Kind
from tests.diagonal import nightly
from tests.runtime.hard_layers import Noise, Threads, Written

DEVICES = 4


@pytest.fixture(scope="module")
def model() -> nn.Sequential:
    return gpt(vocab=64, layers=16, width=32, heads=2, context=16)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 64, (rows, 17), generator=torch.Generator().manual_seed(rows))
    return tokens[:, :-1], tokens[:, 1:]


def pipeline(
    model: nn.Sequential, recompute: object, schedule: str = "one_f_one_b"
) -> pykern.Pipeline:
    return pykern.Pipeline(
        copy.deepcopy(model),
        devices=f"cpu:{DEVICES}",
        schedule=schedule,
        microbatches=8,
        loss_fn=next_token_loss,
        recompute=recompute,  # type: ignore[arg-type]
    )


def peaks(pipe: pykern.Pipeline) -> list[int]:
    """Most bytes of each device in a step, gradients of parameters not counted."""
    x, y = batch(16)
    pipe.step(x, target=y)
    with counted_bytes(pipe) as devices:
        for _ in range(2):
            pipe.step(x, target=y)
    return [live.peak for live in devices]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("interleaved", [0.5]),
        nightly("one_f_one_b", [0.3, 0.5, 0.7]),
        nightly("gpipe", [0.3]),
    ],
)
def test_measured_bytes_stay_within_the_budget(
    model: nn.Sequential, schedule: str, shares: list[float]
) -> None:
    x, y = batch(2)
    with pipeline(model, "none", schedule) as pipe:
        whole = max(peaks(pipe))
        loss = pipe.step(batch(16)[0], target=batch(16)[1])
    for share in shares:
        with pipeline(model, Budget(share * whole, x, y), schedule) as pipe:
            assert pipe.fitted is not None
            assert max(pipe.fitted.peak_bytes) <= share * whole
            for device, measured in enumerate(peaks(pipe)):
                assert measured <= pipe.fitted.peak_bytes[device]
            assert torch.equal(pipe.step(batch(16)[0], target=batch(16)[1]), loss)


def test_choosing_leaves_no_trace(model: nn.Sequential) -> None:
    layers = nn.Sequential(*copy.deepcopy(model), nn.BatchNorm1d(16))
    before = copy.deepcopy(layers.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    x, y = batch(2)
    with pykern.Pipeline(
        layers,
        devices="cpu:2",
        microbatches=2,
        loss_fn=next_token_loss,
        recompute=Budget(1e9, x, y),
    ) as pipe:
        assert pipe.fitted is not None
        assert not pipe.plan.has(Kind.R)
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in layers.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in layers.parameters())


class TrainedLoss(nn.Module):
    """Trains, and counts its calls in a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.mse_loss(output * self.scale, target)


def test_choosing_leaves_no_trace_in_loss_generators_and_sample() -> None:
    noise, loss = Noise(), TrainedLoss()
    loss.scale.grad = first = torch.full((6,), 5.0)
    state = noise.generator.get_state()
    x = torch.ones(2, 6)
    sample = x.clone().requires_grad_()
    for given in (sample, x.clone()):
        # The second one is written into.
        before = [] if given is sample else [Written()]
        layers = nn.Sequential(*before, nn.Linear(6, 6), noise, nn.Linear(6, 6))
        budget = Budget(1e9, given, x)
        pykern.Pipeline(
            layers, devices="cpu:2", microbatches=2, loss_fn=loss, recompute=budget
        ).close()
        assert torch.equal(given.detach(), x)
    assert sample.grad is None
    assert loss.scale.grad is first
    assert torch.equal(first, torch.full((6,), 5.0))
    assert loss.calls == 0
    assert torch.equal(noise.generator.get_state(), state)


def test_levels_are_measured_with_the_threads_of_a_worker() -> None:
    layers = [Threads() for _ in range(4)]
    budget = Budget(1e9, torch.ones(2, 2), torch.ones(2, 2))
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        pykern.Pipeline(
            layers, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss, recompute=budget
        ).close()
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
    # Layers ran in copies, which share the set.
    assert layers[0].seen == {2}


def test_a_budget_may_be_made_in_inference_mode() -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    y = torch.ones(2, 6)
    with torch.inference_mode():
        x = torch.ones(2, 6)
        with pykern.Pipeline(
            layers, devices="cpu:2", microbatches=2, loss_fn=F.mse_loss, recompute=Budget(1e9, x, y)
        ) as pipe:
            assert pipe.fitted is not None


def test_what_the_sample_raises_says_so() -> None:
    x = torch.ones(2, 7)
    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        pykern.Pipeline(
            [nn.Linear(6, 6), nn.Linear(6, 6)],
            devices="cpu:2",
            microbatches=2,
            loss_fn=F.mse_loss,
            recompute=Budget(1e9, x, x),
        )
    assert raised.value.__notes__ == ["pykern: raised while the sample of a Budget ran"]


def test_a_loss_without_its_target_is_told_where_to_give_it() -> None:
    budget = Budget(1e9, torch.ones(2, 4))
    with pytest.raises(TypeError, match="target") as raised:
        pykern.Pipeline(
            nn.Sequential(nn.Linear(4, 4)),
            devices="cpu:1",
            microbatches=2,
            loss_fn=F.mse_loss,
            recompute=budget,
        )
    remedy = "pykern: a loss that takes a target needs Budget(..., target=...)"
    assert raised.value.__notes__[-1] == remedy


def test_what_cannot_be_chosen_is_refused() -> None:
    def make(budget: Budget, loss_fn: Any = F.mse_loss) -> None:
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        pykern.Pipeline(layers, devices="cpu:2", microbatches=2, loss_fn=loss_fn, recompute=budget)

    x, threads = torch.zeros(2, 4), threading.active_count()
    with pytest.raises(ValueError, match="for the activations of device 0 at any level, got 8"):
        make(Budget(8, x, x))
    with pytest.raises(ValueError, match="num_bytes must be above 0, got 0 for device 1"):
        make(Budget([8, 0], x, x))
    with pytest.raises(ValueError, match="num_bytes must be above 0, got '8GiB' for device 0"):
        make(Budget("8GiB", x, x))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the batch must have at least 1 row, got 0"):
        make(Budget(1e9, x[:0], x[:0]))
    with pytest.raises(
        ValueError,
        match="num_bytes must be one for all, or a list with one for each of 2 devices, got 1",
    ):
        make(Budget([8], x, x))
    with pytest.raises(ValueError, match="loss_fn must be given for a memory budget, got None"):
        make(Budget(8, x, x), None)
    # The workers of a pipeline that was refused have ended.
    assert threading.active_count() == threads
