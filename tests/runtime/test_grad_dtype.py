"""Parameters in bfloat16 whose gradients are float32: copies collect in float32, too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.support.pipelines import small

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ones(1), "grad_dtype"), reason="this torch has no grad_dtype"
)


class Product(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


def model(is_tied: bool) -> nn.Sequential:
    torch.manual_seed(2)
    weight = nn.Parameter(torch.randn(4, 4))
    last = Product(weight) if is_tied else nn.Linear(4, 4)
    made = nn.Sequential(Product(weight), nn.Linear(4, 4), last).to(torch.bfloat16)
    for parameter in made.parameters():
        parameter.grad_dtype = torch.float32
    return made


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "zb_h1"}, {"schedule": "chimera"}, {"recompute": "layer"}, {"loss_fn": None}],
    ids=str,
)
def test_gradients_are_the_plain_models(options: dict[str, Any], is_tied: bool) -> None:
    plain, ours = model(is_tied), model(is_tied)
    x, y = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    for part, target in zip(x.split(2), y.split(2), strict=True):
        (F.mse_loss(plain(part), target) / 4).backward()
    with small(ours, microbatches=4, **options) as pipe:
        if "loss_fn" in options:
            losses = map(F.mse_loss, pipe(x).split(2), y.split(2))
            (sum(losses) / 4).backward()  # type: ignore[union-attr]
        else:
            pipe.step(x, target=y)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == torch.float32
        # A microbatch's gradient has eight bits, so that sums of float32 are exact in any order.
        assert torch.equal(one.grad, other.grad)


def test_bytes_of_gradients_are_those_of_their_dtype() -> None:
    x = torch.empty(4, 4, dtype=torch.bfloat16)
    made = model(False)
    given: dict[str, Any] = {"microbatches": 2, "loss_fn": F.mse_loss}
    found = pykern.estimate(made, devices=1, sample=x, target=x, optimizer=torch.optim.SGD, **given)
    with pykern.Pipeline(made, devices="cpu:1", **given) as pipe:
        pipe.step(x.normal_(), target=x)
        held = pipe.memory().devices[0].gradients
    expected = sum(4 * parameter.numel() for parameter in made.parameters())
    assert found.devices[0].gradients == held == expected
