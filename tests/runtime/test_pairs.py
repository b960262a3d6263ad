"""Options drawn by chance, several at once: every bit is that of the plain model."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.plans import late_weights, split_some, two_replicas
from tests.runtime.skip_models import MODELS, WIDTH, Skips, plain_output, plain_step, twin_of
from tests.support.comparison import assert_same_state
from tests.support.plain_step import rows_of


class Masked(nn.Module):
    """A layer that names an argument of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * mask


class Layers(nn.ModuleList):
    """The results of the layers alone."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self:
            x = layer(x, mask) if isinstance(layer, Masked) else layer(x)
        return x


def layers(rows: int) -> Skips:
    parts = [Masked() if number % 3 else nn.Linear(WIDTH, WIDTH) for number in range(8)]
    x, y = torch.randn(2, rows, WIDTH)
    return Skips(Layers(parts), {"x": x, "mask": torch.rand(rows, 1)}, y)


PLANS: list[Plan] = [
    schedules.gpipe(4, 3),
    schedules.one_f_one_b(3, 5),
    schedules.interleaved(2, 4, 2),
    schedules.hanayo(2, 4, waves=1),
    schedules.zb_v(2, 5),
    split_some(schedules.one_f_one_b(4, 4)),
    late_weights(schedules.one_f_one_b(4, 6)),
    schedules.chimera(4, 4),
    two_replicas(3, 4),
]
CASES = {**MODELS, "layers": layers}


class Stop(Exception):
    """Raised by the loss of a microbatch."""


class Drawn:
    """A pipeline with options drawn by chance, and its plain model."""

    def __init__(self, seed: int, device: str) -> None:
        draw = random.Random(seed)
        self.plan = draw.choice(PLANS)
        # Also less rows than microbatches.
        rows = self.plan.num_microbatches * 2 + draw.choice([-5, -1, 0, 1])
        self.case = CASES[draw.choice(sorted(CASES))](max(rows, 2))
        self.plain = twin_of(self.case)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if draw.random() < 0.3 else None
        self.num_ran = len(rows_of(len(self.case.target), self.plan.num_microbatches))
        self.stops_at = draw.randrange(self.num_ran)
        self.left: int | None = None
        options: dict[str, Any] = {
            "recompute": draw.choice([None, "stage", "layer"]),
            "check_finite": draw.choice(["off", "loss", "grads", "activations"]),
        }
        model: Any = self.case.model
        is_chain = isinstance(model, Layers)
        part = -(-len(self.case.target) // self.plan.num_microbatches)
        inputs, count = self.case.inputs, self.plan.num_devices
        self.pipe = pykern.Pipeline(
            list(model) if is_chain else model,
            devices=f"cpu:{count}" if device == "cpu" else [f"cuda:{n}" for n in range(count)],
            schedule=self.plan,
            loss_fn=self.loss,
            sample=None if is_chain else {name: value[:part] for name, value in inputs.items()},
            **options,
        )

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Stop
        return self.case.loss_fn(output, target)

    def step(self) -> Tensor:
        first, *named = self.case.inputs.items()
        return self.pipe.step(first[1], target=self.case.target, scaler=self.scaler, **dict(named))

    def expect_step(self) -> None:
        """Gradients are those of one plain step."""
        self.pipe.zero_grad()
        self.plain.zero_grad()
        count, replicas = self.plan.num_microbatches, self.plan.placement.num_replicas
        expected = plain_step(self.plain, self.case, count, replicas)
        assert torch.equal(self.step(), expected)
        for parameter in self.plain.parameters():
            # A power of two, so that no bit is lost.
            if parameter.grad is not None and self.scaler is not None:
                parameter.grad *= 4
        assert_same_state(self.pipe, self.plain)

    def expect_failure(self) -> None:
        self.left = self.stops_at
        with pytest.raises(Stop):
            self.step()
        self.left = None

    def expect_outputs(self) -> None:
        expected = plain_output(self.plain, self.case, self.plan.num_microbatches)
        first, *named = self.case.inputs.items()
        assert torch.equal(self.pipe(first[1], **dict(named)), expected)
        if not isinstance(self.case.model, Layers):
            for output in self.pipe.stream([self.case.inputs] * 3):
                assert torch.equal(output, expected)


def check(seed: int, device: str) -> None:
    torch.manual_seed(seed)
    drawn = Drawn(seed, device)
    with drawn.pipe:
        drawn.expect_step()
        drawn.expect_failure()
        drawn.expect_step()
        drawn.expect_outputs()
        drawn.expect_step()


@pytest.mark.parametrize("seed", range(12))
def test_on_workers(seed: int) -> None:
    check(seed, "cpu")


@pytest.mark.parametrize("seed", range(100, 104))
def test_on_gpus(gpus: FakeCuda, seed: int) -> None:
    check(seed, "cuda")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(12, 100))
def test_more_on_workers(seed: int) -> None:
    check(seed, "cpu")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(104, 140))
def test_more_on_gpus(gpus: FakeCuda, seed: int) -> None:
    check(seed, "cuda")
