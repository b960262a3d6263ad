"""Layers that write their own parameters, called in grad mode."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.outside.cases import MICROBATCHES, WIDTH, batch, mean_square, pipeline


class Decays(nn.Linear):
    """Writes its weight."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        return super().forward(x)


class Renewed(nn.Linear):
    """Gives its weight other memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data * 0.9
        return super().forward(x)


@pytest.mark.parametrize("recompute", [None, "layer"])
@pytest.mark.parametrize("kind", [Decays, Renewed])
def test_a_call_in_grad_mode_writes_parameters(kind: type[nn.Linear], recompute: Any) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)), kind(WIDTH, WIDTH))
    plain = copy.deepcopy(layers)
    with pipeline(layers, recompute=recompute) as pipe:
        for _ in range(2):
            mean_square(pipe(batch())).backward()
            for part in batch().chunk(MICROBATCHES):
                plain(part)
    for mine, theirs in zip(layers.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
