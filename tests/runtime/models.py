"""Small models of different kinds, each a chain of at least eight layers, with a loss and data."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.models.gpt import gpt
from pykern.plan import Plan
from tests.support.pipelines import planned


@dataclass
class Case:
    """A model, and what to feed it."""

    layers: nn.Sequential
    inputs: Tensor
    target: Tensor
    loss_fn: Callable[[Tensor, Tensor], Tensor]

    def pipeline(self, plan: Plan, devices: Any = "cpu", **options: Any) -> pykern.Pipeline:
        """A pipeline of the layers, see `planned`."""
        return planned(self.layers, plan, self.loss_fn, devices, **options)


class Rows(nn.LSTM):
    """An LSTM over the rows of a microbatch. It keeps its parameters in a list too."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[None])[0][0]


class TrainedLoss(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output * self.scale, target)


class Residual(nn.Module):
    """x + linear(tanh(x))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.tanh(x))


class Pair(nn.Module):
    """Turns a tensor into a dict with a tensor, a tensor without gradient and a number."""

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"x": x, "mask": (x > 0), "scale": 0.5}


class Unpair(nn.Module):
    """The inverse of Pair."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, parts: dict[str, Tensor]) -> Tensor:
        return self.linear(parts["x"] * parts["scale"]) * parts["mask"]


def mlp(rows: int) -> Case:
    layers = [layer for _ in range(5) for layer in (nn.Linear(12, 12), Residual(12))]
    return Case(nn.Sequential(*layers), torch.randn(rows, 12), torch.randn(rows, 12), F.mse_loss)


def byte_gpt(rows: int) -> Case:
    model = gpt(vocab=32, layers=3, width=16, heads=2, context=8)
    ids = torch.randint(32, (rows, 9))

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    return Case(model, ids[:, :-1], ids[:, 1:], loss)


def cnn(rows: int) -> Case:
    """Batch normalisation with its buffers, and layers that work in place."""
    layers: list[nn.Module] = []
    for before, after in ((3, 4), (4, 4), (4, 6)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after)]
        layers += [nn.ReLU(inplace=True)]
    layers += [nn.Flatten(), nn.Linear(6 * 25, 5)]
    data = torch.randn(rows, 3, 5, 5)
    return Case(nn.Sequential(*layers), data, torch.randint(5, (rows,)), F.cross_entropy)


def dropout(rows: int) -> Case:
    layers = [layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.Dropout(0.4))]
    layers.append(nn.Linear(12, 3))
    return Case(
        nn.Sequential(*layers), torch.randn(rows, 12), torch.randint(3, (rows,)), F.cross_entropy
    )


def frozen(rows: int) -> Case:
    """The first layers, at least the first stage whatever the cut, do not train."""
    case = mlp(rows)
    for layer in list(case.layers)[:4]:
        layer.requires_grad_(False)
    return case


def structured(rows: int) -> Case:
    """Dicts with tensors, masks and numbers between the layers."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(10, 10), Pair(), Unpair(10)]
    return Case(nn.Sequential(*layers), torch.randn(rows, 10), torch.randn(rows, 10), F.l1_loss)


class Loop(nn.Module):
    """Uses the same parameters three times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.linear(x))
        return x


def recurrent(rows: int) -> Case:
    layers = [layer for _ in range(4) for layer in (Loop(9), nn.LayerNorm(9))]
    return Case(nn.Sequential(*layers), torch.randn(rows, 9), torch.randn(rows, 9), F.mse_loss)


CASES: dict[str, Callable[[int], Case]] = {
    "mlp": mlp,
    "gpt": byte_gpt,
    "cnn": cnn,
    "dropout": dropout,
    "frozen": frozen,
    "structured": structured,
    "recurrent": recurrent,
}
