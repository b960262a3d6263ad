"""Arguments and losses that begin to steer layers: R repeats the random numbers of F."""

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.schedules import gpipe
from tests.runtime.hard_layers import linear
from tests.runtime.test_recompute_changes import LEVELS, steered
from tests.support.comparison import assert_same_state
from tests.support.pipelines import planned
from tests.support.plain_step import plain_step


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("recorded", [False, True])
def test_an_argument_may_begin_to_steer_layers(level: Any, recorded: bool) -> None:
    """The masks of the first steps with dropout, and of none before, are those of the forwards."""
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    found = []
    for num_before, by in ((2, level), (0, None)):
        torch.manual_seed(2)
        model = Passes(steered()) if recorded else nn.Sequential(*steered())
        sample = x[:2] if recorded else None
        with planned(model, gpipe(2, 2), recompute=by, sample=sample) as pipe:
            for _ in range(num_before):
                pipe.step(x, target=y)
            pipe.zero_grad()
            torch.manual_seed(3)
            loss = pipe.step(x, target=y, drops=True)
            found.append([loss, *(parameter.grad for parameter in pipe.parameters())])
    assert all(map(torch.equal, *found))


class DroppingLoss(nn.Module):
    """Drops values in train mode, or if a string says so."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "keeps"
        self.eval()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        drops = self.training or self.kind == "drops"
        return F.mse_loss(F.dropout(output, 0.5, drops), target)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("change", [nn.Module.train, lambda loss: setattr(loss, "kind", "drops")])
def test_a_loss_may_begin_to_draw(level: Any, change: Callable[[nn.Module], object]) -> None:
    loss, layers = DroppingLoss(), nn.Sequential(*(linear() for _ in range(4)))
    plain = copy.deepcopy(layers)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    with planned(layers, gpipe(2, 2), recompute=level, loss_fn=loss) as pipe:
        for step in range(3):
            if step == 1:
                change(loss)
            torch.manual_seed(step)
            expected = plain_step(plain, x, y, loss, 2, pipe.partition.stages)
            torch.manual_seed(step)
            assert torch.equal(pipe.step(x, target=y), expected)
            assert_same_state(pipe, plain)


def dropped(output: Tensor, target: Tensor, rate: float) -> Tensor:
    return F.mse_loss(F.dropout(output, rate), target)


@pytest.mark.parametrize("level", LEVELS)
def test_another_function_of_a_map_may_draw(level: Any) -> None:
    """The functions may have the same place in memory, one after another."""
    layers = nn.Sequential(*(linear() for _ in range(4)))
    plain = copy.deepcopy(layers)
    x, y = torch.randn(4, 6), torch.randn(4, 6)

    with planned(layers, gpipe(2, 2), recompute=level, loss_fn=None) as pipe:
        for rate in (0.0, 0.5):
            torch.manual_seed(2)
            plain_step(plain, x, y, partial(dropped, rate=rate), 2, pipe.partition.stages)
            torch.manual_seed(2)
            if rate == 0:
                pipe.map(lambda o, t: dropped(o, t, 0.0), x, target=y)
            else:
                pipe.map(lambda o, t: dropped(o, t, 0.5), x, target=y)
            assert_same_state(pipe, plain)


class DroppingObject:
    """A loss that is not a module, with a rate in an attribute."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return dropped(output, target, self.rate)


class DroppingSlots:
    """A loss that a weak reference cannot refer to."""

    __slots__ = ("rate",)

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return dropped(output, target, self.rate)


def in_a_closure() -> tuple[Any, Callable[[], None]]:
    rate = 0.0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return dropped(output, target, rate)

    def change() -> None:
        nonlocal rate
        rate = 0.5

    return loss, change


def in_an_attribute(*, of_a_method: bool) -> tuple[Any, Callable[[], None]]:
    held = DroppingObject(0.0)
    return held.__call__ if of_a_method else held, lambda: setattr(held, "rate", 0.5)


def require_the_draws(pipe: Any, plain: nn.Sequential, loss: Any) -> None:
    """A step with a loss that is given with the batch has the random numbers of the plain model."""
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    torch.manual_seed(2)
    plain_step(plain, x, y, loss, 2, pipe.partition.stages)
    torch.manual_seed(2)
    pipe.map(loss, x, target=y)
    assert_same_state(pipe, plain)


CHANGES: dict[str, Callable[[], tuple[Any, Callable[[], None]]]] = {
    "closure": in_a_closure,
    "attribute": lambda: in_an_attribute(of_a_method=False),
    "attribute of a method's object": lambda: in_an_attribute(of_a_method=True),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", CHANGES)
def test_a_value_of_a_loss_may_have_it_draw(level: Any, kind: str) -> None:
    layers = nn.Sequential(*(linear() for _ in range(4)))
    plain = copy.deepcopy(layers)
    loss, change = CHANGES[kind]()
    with planned(layers, gpipe(2, 2), recompute=level, loss_fn=None) as pipe:
        for _ in range(2):
            require_the_draws(pipe, plain, loss)
        change()
        require_the_draws(pipe, plain, loss)


LOSSES: dict[str, Callable[[float], Any]] = {
    "partial": lambda rate: partial(dropped, rate=rate),
    "method": lambda rate: DroppingObject(rate).__call__,
    "object": DroppingObject,
    "slots": DroppingSlots,
}


@pytest.mark.parametrize("kind", LOSSES)
def test_another_loss_at_the_place_of_the_last_one_may_draw(kind: str) -> None:
    layers = nn.Sequential(*(linear() for _ in range(4)))
    plain = copy.deepcopy(layers)
    with planned(layers, gpipe(2, 2), recompute="stage", loss_fn=None) as pipe:
        loss = LOSSES[kind](0.0)
        require_the_draws(pipe, plain, loss)
        place = id(loss)
        del loss
        gc.collect()
        others = []
        for _ in range(1000):
            loss = LOSSES[kind](0.5)
            others.append(loss)
            if id(loss) == place:
                break
        require_the_draws(pipe, plain, loss)


class Passes(nn.Module):
    """Passes an argument on to its layers."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, drops: bool = False) -> Tensor:
        for layer in self.layers:
            x = layer(x, drops=drops)
        return x
