"""Models whose stages share parameters, and what is asked of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.runtime.models import Case, Residual
from tests.runtime.untied import Untied
from tests.support.pipelines import planned

WIDTH = 6


def shared_by_many(rows: int) -> Case:
    """A weight in three layers, two biases in two, and a module with dropout in three places."""
    first, middle, last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    middle.weight = last.weight = first.weight
    last.bias = middle.bias
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh())
    layers = [first, block, nn.Tanh(), middle, Residual(WIDTH), block]
    layers += [nn.LayerNorm(WIDTH), block, nn.Tanh(), last]
    x, y = torch.randn(2, rows, WIDTH)
    return Case(nn.Sequential(*layers), x, y, F.mse_loss)


def tied_ends(num_between: int = 1) -> nn.Sequential:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    last.weight = first.weight
    return nn.Sequential(first, *(nn.Tanh() for _ in range(num_between)), last)


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def pipeline(model: nn.Module, plan: Plan | None = None, **options: Any) -> pykern.Pipeline:
    usual: dict[str, Any] = {"balance": None}
    return planned(model, plan or schedules.one_f_one_b(2, 4), **(usual | options))


def require_bits(
    pipe: pykern.Pipeline, untied: Untied, x: Tensor, y: Tensor, num_replicas: int = 1
) -> None:
    expected = untied.step(
        x,
        y,
        F.mse_loss,
        pipe.plan.num_microbatches,
        pipe.partition.stages,
        num_replicas=num_replicas,
    )
    assert torch.equal(pipe.step(x, target=y), expected)
    untied.require_same()
