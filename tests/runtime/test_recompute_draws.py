"""Recomputed stages that draw: R begins from the seeds of F, once it is known which draws come."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.plan import Plan
from pykern.runtime.random import draws
from pykern.runtime.random.eager import Begins, Repeat, Seeded
from pykern.schedules import gpipe, interleaved, one_f_one_b
from tests.runtime.hard_layers import linear
from tests.runtime.plans import recomputed
from tests.support.pipelines import planned

PLANS: dict[str, Plan] = {
    "one worker": interleaved(1, 3, 2),
    "gpipe": gpipe(2, 3),
    "1f1b": one_f_one_b(2, 3),
}


class Drops(nn.Module):
    """Draws for each element, as nearly all layers that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.5)


class Shuffles(Drops):
    """Draws by an operation without a tensor as well, which takes the default generator."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return F.dropout(y[:, torch.randperm(6)], 0.25)


class Counts(Drops):
    """Counts in a buffer, so that R has more to restore than draws."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x) * self.count.clone()


class HasOwn(Drops):
    """Draws from a generator of its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.own = [torch.Generator().manual_seed(3)]

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.bernoulli(torch.full((6,), 0.5), generator=self.own[0])
        return super().forward(x) * mask


class Recorded(nn.Module):
    """A forward of its own around such layers."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


# The workers of a plan reach a generator in no fixed order.
CASES = [
    *((kind, plan) for kind in (Drops, Shuffles, Counts) for plan in PLANS),
    (HasOwn, "one worker"),
]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Begins]:
    """The states that each R repeats draws from."""
    found: list[Begins] = []

    class Noted(Repeat):
        def __init__(self, begins: Begins) -> None:
            found.append(begins)
            super().__init__(begins)

    monkeypatch.setattr(draws, "Repeat", Noted)
    return found


def steps(model: nn.Module, plan: Plan, *, outside: bool, recompute: Any) -> list[Tensor]:
    """The losses and gradients of some steps, with the loss in the pipeline or outside."""
    torch.manual_seed(1)
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    found: list[Tensor] = []
    sample = {"sample": x[:2]} if isinstance(model, Recorded) else {}
    with planned(model, plan, recompute=recompute, **sample) as pipe:
        for _ in range(4):
            if outside:
                loss = F.mse_loss(pipe(x), y)
                loss.backward()
            else:
                loss = pipe.step(x, target=y)
            found.append(loss.detach())
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
    return found


@pytest.mark.parametrize("level", ["layer", "stage"])
@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize(("kind", "plan"), CASES)
def test_the_bits_are_those_without_recompute(
    begun: list[Begins],
    kind: type[Drops],
    plan: str,
    is_recorded: bool,
    outside: bool,
    level: str,
) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(kind(), kind(), kind(), nn.Tanh())
    model: nn.Module = Recorded(layers) if is_recorded else layers
    twin = copy.deepcopy(model)
    for one, other in zip(model.modules(), twin.modules(), strict=True):
        if isinstance(one, HasOwn) and isinstance(other, HasOwn):
            other.own = [torch.Generator().manual_seed(3)]
    found = steps(model, recomputed(PLANS[plan]), outside=outside, recompute=level)
    # After the first steps, which are watched.
    seeded = [any(isinstance(one, Seeded) for one in begins.values()) for begins in begun]
    assert any(seeded)
    assert level == "layer" or seeded[-1]
    expected = steps(twin, PLANS[plan], outside=outside, recompute=None)
    for mine, of_twin in zip(found, expected, strict=True):
        assert torch.equal(mine, of_twin)
