"""Recomputed stages of recorded forwards, whose values R computes again by the segments alone."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.plan import Plan
from pykern.runtime.stage import one_graph_of_values
from pykern.runtime.stage.stage import Stage
from pykern.schedules import gpipe, interleaved, one_f_one_b
from tests.runtime.plans import recomputed
from tests.runtime.recorded_models import (
    MODELS,
    PLANS,
    WIDTH,
    Skipping,
    assert_equal,
    linears,
    steps,
)
from tests.support.pipelines import planned

RECOMPUTED: dict[str, Plan] = {name: recomputed(plan) for name, plan in PLANS.items()}


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """By R, whether the segments alone made the graph."""
    found: list[bool] = []
    recompute = one_graph_of_values.recompute

    def noted(stage: Stage, others: Callable[[int], None]) -> Callable[[int], None]:
        run = recompute(stage, others)

        def note(microbatch: int) -> None:
            found.append(isinstance(stage.recomputed.cells.get(microbatch), tuple))
            run(microbatch)

        return note

    monkeypatch.setattr(one_graph_of_values, "recompute", noted)
    return found


@pytest.mark.parametrize("plan", RECOMPUTED)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_without_recompute(again: list[bool], name: str, plan: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    found = steps(model, RECOMPUTED[plan], 4, recompute="stage")
    assert again[-1]
    assert_equal(found, steps(twin, PLANS[plan], 4))


class Noting(nn.Module):
    """Notes in its forwards how many activations of each block there are."""

    def __init__(self, blocks: list[Noting]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.blocks = [blocks]
        self.found: list[list[int]] = []
        blocks.append(self)

    def forward(self, x: Tensor) -> Tensor:
        self.found.append([len(block.inner) for block in self.blocks[0]])
        hidden = torch.tanh(self.up(x))
        self.inner.add(hidden)
        y: Tensor = self.down(hidden)
        return y


class Same(nn.Module):
    """Gives a copy when it is recorded, and later what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone() if COPIES else x


COPIES: list[bool] = []
WHOLE = [*(f"blocks.{number}" for number in range(3)), "same"]


class Chain(nn.Module):
    """Blocks, one of whose outputs is two values of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.noting: list[Noting] = []
        self.blocks = nn.ModuleList(Noting(self.noting) for _ in range(3))
        self.same = Same()

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        y = first(x)
        again = self.same(y)
        z = second(y)
        out: Tensor = third(z) * again + y
        return out


def test_f_frees_the_graph_of_each_segment_and_r_makes_one() -> None:
    model = Chain()
    plain = copy.deepcopy(model)
    # In memory of their own: the loss must not read what the first segment has read.
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    in_loss: list[list[int]] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        in_loss.append([len(block.inner) for block in model.noting])
        return F.mse_loss(output, target)

    plan = recomputed(gpipe(1, 2))
    with planned(model, plan, loss_fn, recompute="stage", sample=x[:2], whole=WHOLE) as pipe:
        last = model.noting[-1]
        for _ in range(3):
            last.found.clear()
            in_loss.clear()
            pipe.step(x, target=y)
            for rows, target in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.mse_loss(plain(rows), target) / 2).backward()
            for mine, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
                assert mine.grad is not None
                assert of_plain.grad is not None
                assert torch.equal(mine.grad, of_plain.grad)
    assert sorted(last.found) == [[0, 0, 0]] * 2 + [[1, 1, 0]] * 2
    assert sorted(in_loss) == [[0, 0, 0]] * 2 + [[1, 1, 1]] * 2


def test_a_tensor_that_is_two_values_stays_one() -> None:
    """Behind a cut within the stage, it goes to the next stage, which gives it one gradient."""
    model = Chain()
    twin = copy.deepcopy(model)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    options: dict[str, Any] = {"sample": x[:2], "whole": WHOLE, "split_at": WHOLE[2:3]}
    for one, plan in ((model, recomputed(gpipe(2, 2))), (twin, gpipe(2, 2))):
        COPIES.append(True)
        with planned(one, plan, balance=None, **options) as pipe:
            for _ in range(3):
                pipe.step(x, target=y)
                COPIES.clear()
    for mine, of_twin in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        assert of_twin.grad is not None
        assert torch.equal(mine.grad, of_twin.grad)


@pytest.mark.parametrize("num_good_steps", [0, 2])
def test_a_batch_must_not_be_written_before_its_recompute(num_good_steps: int) -> None:
    x, y = torch.randn(2, 4, WIDTH).unbind()
    writes = False

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if writes:
            x.zero_()
        return F.mse_loss(output, target)

    # On one worker, on which R of the first stage follows the loss.
    plan = interleaved(1, 2, 2)
    with planned(Skipping(), plan, loss_fn, recompute="stage", sample=x[:2]) as pipe:
        for _ in range(num_good_steps):
            pipe.step(x, target=y)
        writes = True
        with pytest.raises(RuntimeError, match="the batch must stay as it is until recompute"):
            pipe.step(x, target=y)


class Grows(nn.Linear):
    """Returns another shape when it has been called often enough."""

    def __init__(self, calls: list[Tensor], last: int) -> None:
        super().__init__(WIDTH, WIDTH)
        self.calls, self.last = [calls], last

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0].append(x)
        return super().forward(x).repeat(1, 1 + (len(self.calls[0]) > self.last))


class Buffered(nn.Linear):
    """Begins to write a buffer that it has left alone."""

    mean: Tensor

    def __init__(self, writing: list[bool]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.writing = [writing]
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.writing[0]:
            self.mean.add_(y.detach().mean(0))
        return y - self.mean


class Around(nn.Module):
    """One layer, and others behind it, with a value that skips them."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.blocks = layer, linears(2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.blocks
        y = self.layer(x)
        out: Tensor = torch.add(second(first(y[:, :WIDTH])), y[:, :WIDTH])
        return out


def test_layers_that_do_something_else_the_second_time_are_refused() -> None:
    calls: list[Tensor] = []
    x = torch.randn(2, WIDTH)
    plan = recomputed(one_f_one_b(2, 2))
    options: dict[str, Any] = {"whole": ["layer"], "split_at": ["blocks.0"], "sample": x[:1]}
    # A step calls the layer four times.
    model = Around(Grows(calls, 10))
    with planned(model, plan, recompute="stage", balance=None, **options) as pipe:
        calls.clear()
        for _ in range(2):
            pipe.step(x, target=x)
        with pytest.raises(RuntimeError, match=r"that require grad when they were recomputed"):
            pipe.step(x, target=x)


def test_a_layer_that_begins_to_write_a_buffer_is_refused() -> None:
    writing: list[bool] = []
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    options: dict[str, Any] = {"whole": ["layer"], "split_at": ["blocks.0"], "sample": x[:2]}
    model = Around(Buffered(writing))
    with planned(model, gpipe(2, 3), recompute="stage", balance=None, **options) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        writing.append(True)
        with pytest.raises(RuntimeError, match=r"has written to buffer 'mean' of a layer"):
            pipe.step(x, target=y)
