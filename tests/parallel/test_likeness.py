"""Loss functions that differ are told apart; the same one is not, in whichever process."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.parallel.peers.likeness import likeness


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.rank = os.getpid()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.inner(output, target) * 2
        return found


class Halved(Scaled):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.inner(output, target) / 2
        return found


class Called:
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).abs().mean() if {"a", "b"} else output

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()


def with_default(output: Tensor, target: Tensor, weight: float = 0.5) -> Tensor:
    return F.mse_loss(output, target) * weight


def nested(output: Tensor, target: Tensor) -> Tensor:
    return torch.stack(list(map(lambda x: x * 3, output - target))).mean()


def made(rank: int) -> Callable[..., Tensor]:
    return lambda output, target: F.mse_loss(output, target) + 0 * rank


LOSSES: list[Any] = [
    None,
    F.mse_loss,
    F.l1_loss,
    torch.dist,
    partial(F.cross_entropy, label_smoothing=0.1),
    partial(F.cross_entropy, label_smoothing=0.2),
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(label_smoothing=0.1),
    nn.MSELoss(),
    nn.MSELoss(reduction="sum"),
    Scaled(nn.MSELoss()),
    Scaled(nn.L1Loss()),
    Halved(nn.MSELoss()),
    Called(),
    Called().method,
    with_default,
    nested,
    made(1),
    lambda output, target: F.mse_loss(output, target) + 1,
    lambda output, target: F.l1_loss(output, target) + 1,
    lambda output, target: 2 * F.mse_loss(output, target),
    lambda output, target: 3 * F.mse_loss(output, target),
]


def test_each_differs_from_all_others() -> None:
    assert len({likeness(loss) for loss in LOSSES}) == len(LOSSES)


def test_another_of_the_same_is_the_same() -> None:
    assert likeness(made(1)) == likeness(made(2))
    assert likeness(nn.CrossEntropyLoss(torch.rand(3))) == likeness(
        nn.CrossEntropyLoss(torch.rand(3))
    )
    assert likeness(Called()) == likeness(Called())


def test_another_process_says_the_same() -> None:
    """Addresses, and the order in which a set is shown, differ from process to process."""
    code = (
        "from tests.parallel.test_likeness import LOSSES, likeness\n"
        "print(*map(likeness, LOSSES), sep='\\n')"
    )
    shown = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        for seed in ("1", "2")
    ]
    assert shown[0] == shown[1] == [likeness(loss) for loss in LOSSES]
