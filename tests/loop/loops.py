"""The same training loop twice: around a pipeline, and around its plain model."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.support.pipelines import small
from tests.support.plain_step import rows_of

WIDTH = 8


class Block(nn.Module):
    """A layer that is not one of torch's own, which torch's compiler looks into."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Linear, tanh and dropout at the rate."""
        return F.dropout(torch.tanh(self.linear(x)), self.rate, self.training)


def mlp(num_layers: int = 6) -> nn.Sequential:
    """Linear layers with something between them that has no parameters."""
    layers: list[nn.Module] = []
    for _ in range(num_layers // 2):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers)


def batch(rows: int = 7) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def pipeline(model: nn.Sequential, **options: Any) -> pykern.Pipeline:
    return small(model, **({"microbatches": 3} | options))


def plain_loop_step(
    model: nn.Module,
    inputs: Tensor,
    target: Tensor,
    *,
    num_microbatches: int = 3,
    scaler: torch.amp.GradScaler | None = None,
    loss_fn: Callable[[Tensor, Tensor], Tensor] = F.mse_loss,
) -> Tensor:
    """Forward and backward as everybody writes them, one microbatch at a time."""
    rows = rows_of(len(inputs), num_microbatches)
    losses = []
    for x, y in zip(inputs.split(rows), target.split(rows), strict=True):
        loss = loss_fn(model(x), y) * (len(x) / len(inputs))
        (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def twins(model: nn.Sequential) -> tuple[nn.Sequential, nn.Sequential]:
    return model, copy.deepcopy(model)


def assert_same(
    pipe: nn.Module, plain: nn.Module, losses: tuple[Tensor, Tensor] | None = None
) -> None:
    """Parameters, gradients, buffers, and two losses if given, to the bit; NaN equals NaN."""
    for name, parameter in pipe.named_parameters():
        _require_same(parameter, plain.get_parameter(name), name)
        _require_same(parameter.grad, plain.get_parameter(name).grad, f"{name}.grad")
    for name, buffer in pipe.named_buffers():
        _require_same(buffer, plain.get_buffer(name), name)
    if losses is not None:
        _require_same(*losses, "loss")


def _require_same(ours: Tensor | None, theirs: Tensor | None, name: str) -> None:
    if ours is None or theirs is None:
        assert ours is theirs, name
    else:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
