"""Buffers that a forward updates from the batch, such as codebooks and running centres."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern

WIDTH, MICROBATCHES = 8, 4


class Centre(nn.Module):
    """Subtracts the moving average of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


class Within(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.centre = Centre()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.centre(self.first(x)))
        return y


class Itself(Centre):
    """Does it in the forward that is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(super().forward(self.first(x)))
        return y


@pytest.mark.parametrize("schedule", ["one_f_one_b", "zb_h1"])
@pytest.mark.parametrize(
    ("kind", "options"), [(Within, {}), (Within, {"whole": ["centre"]}), (Itself, {})]
)
def test_moving_averages(kind: type[nn.Module], options: dict[str, Any], schedule: str) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(16, WIDTH)
    plain = copy.deepcopy(model)
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss_fn=F.mse_loss,
        sample=x[:2],
        **options,
    ) as pipe:
        # The size of microbatches changes, so that the forward is recorded again.
        for rows in (8, 16, 8):
            parts = x[:rows].split(rows // MICROBATCHES)
            for part in parts:
                (F.mse_loss(plain(part), part) / MICROBATCHES).backward()
            pipe.step(x[:rows], target=x[:rows])
            assert torch.equal(_mean(model), _mean(plain))
            for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None
                assert other.grad is not None
                assert torch.equal(mine.grad, other.grad)
        pipe.eval()
        plain.eval()
        with torch.no_grad():
            assert torch.equal(pipe(x), torch.cat([plain(part) for part in x.split(4)]))


def _mean(model: nn.Module) -> Tensor:
    (mean,) = model.buffers()
    return mean
