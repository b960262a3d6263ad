"""Values that no later module needs are freed while a stage's forward runs."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

import pykern


class Kept(nn.Module):
    """Remembers its argument without keeping it."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self._seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self._seen.append(weakref.ref(x))
        y: Tensor = self.linear(x)
        return y


class Asks(Kept):
    """Asks whether the argument of the module before is still there."""

    def forward(self, x: Tensor) -> Tensor:
        self._seen.append(self._seen[-1]() is not None)
        y: Tensor = self.linear(x)
        return y


class Recorded(nn.Module):
    """A model with a forward of its own, whose last two modules form a stage."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.kept = Kept(seen)
        self.asks = Asks(seen)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.asks(self.kept(self.first(x)))
        return y


def test_the_input_of_a_stage_is_freed_when_nobody_needs_it() -> None:
    seen: list[Any] = []
    x = torch.ones(4, 4)
    with pykern.Pipeline(
        Recorded(seen), devices="cpu:2", microbatches=2, sample=x[:2], split_at=["kept"]
    ) as pipe:
        # The first calls look for random draws, and call segment after segment.
        for _ in range(4):
            seen.clear()
            with torch.no_grad():
                pipe(x)
    assert seen[1::2] == [False, False]
