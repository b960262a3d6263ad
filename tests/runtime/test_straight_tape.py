"""Stages of recorded forwards as straight code: the bits of the general way, which they replace."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import pykern
from pykern import schedules
from pykern.runtime.stage import straight_tape
from pykern.runtime.stage.stage import Stage
from tests.runtime.recorded_models import (
    MODELS,
    PLANS,
    ROWS,
    WIDTH,
    InPlace,
    Skipping,
    assert_equal,
    loss_of,
    steps,
)


@pytest.fixture
def straight(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """By step and replica, whether stages ran straight code."""
    found: list[bool] = []
    enter = straight_tape.enter

    def noted(stages: Sequence[Stage], arguments: Any) -> None:
        before = [stage.bare_forward for stage in stages]
        enter(stages, arguments)
        now = [stage.bare_forward for stage in stages]
        changed = [one is not other for one, other in zip(before, now, strict=True)]
        assert len(set(changed)) == 1
        found.append(changed[0])

    monkeypatch.setattr(straight_tape, "enter", noted)
    return found


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_those_of_the_general_way(
    monkeypatch: pytest.MonkeyPatch, straight: list[bool], name: str, plan: str
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    twin = copy.deepcopy(model)
    found = steps(model, PLANS[plan], 4)
    # The first steps, and the first forward, are watched. All that follow run straight code.
    assert straight[-1]
    assert straight.count(True) >= 2 * PLANS[plan].placement.num_replicas

    monkeypatch.setattr(straight_tape, "enter", lambda stages, of: stages[0].enter(of))
    assert_equal(found, steps(twin, PLANS[plan], 4))


@pytest.mark.parametrize("recompute", [None, "stage", "layer"])
def test_modules_in_place_write_no_batch_and_no_value_of_another_stage(
    recompute: Any,
) -> None:
    torch.manual_seed(0)
    model = InPlace()
    plain = copy.deepcopy(model)
    with pykern.Pipeline(
        model, devices="cpu:4", schedule=schedules.one_f_one_b(4, 4), loss_fn=loss_of,
        sample=torch.randn(2, WIDTH), recompute=recompute,
    ) as pipe:  # fmt: skip
        for _ in range(3):
            x, y = torch.randn(2, ROWS, WIDTH)
            given = x.clone()
            pipe.step(x, target=y)
            assert torch.equal(x, given)
            for rows, target in zip(given.chunk(4), y.chunk(4), strict=True):
                (loss_of(plain(rows), target) / 4).backward()
            for mine, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
                assert torch.equal(mine.grad, of_plain.grad)  # type: ignore[arg-type]


def test_microbatches_of_two_sizes_go_the_general_way(straight: list[bool]) -> None:
    torch.manual_seed(0)
    steps(Skipping(), PLANS["1f1b"], 4, rows=6)
    assert not any(straight)


def test_a_later_step_may_have_another_size(straight: list[bool]) -> None:
    """Each tape has functions of its own."""
    torch.manual_seed(0)
    model = Skipping()
    twin = copy.deepcopy(model)
    with pykern.Pipeline(
        model, devices="cpu:2", schedule=schedules.one_f_one_b(2, 2), loss_fn=loss_of,
        sample=torch.randn(2, WIDTH),
    ) as pipe:  # fmt: skip
        for rows in (4, 4, 4, 8, 4, 8):
            x, y = torch.randn(2, rows, WIDTH)
            loss = pipe.step(x, target=y)
            halves = zip(x.chunk(2), y.chunk(2), strict=True)
            expected = [loss_of(twin(a), b) for a, b in halves]
            assert torch.equal(loss, expected[0].detach() / 2 + expected[1].detach() / 2)
    assert straight[-3:] == [True] * 3


def test_a_step_lets_go_of_its_tensors_at_its_end(straight: list[bool]) -> None:
    """Nothing waits for the garbage collector."""
    held: list[weakref.ref[Tensor]] = []

    def noting(output: Tensor, target: Tensor) -> Tensor:
        held.append(weakref.ref(output))
        held.append(weakref.ref(target))
        return F.mse_loss(output, target)

    with pykern.Pipeline(
        Skipping(), devices="cpu:2", schedule=schedules.one_f_one_b(2, 2), loss_fn=noting,
        sample=torch.randn(2, WIDTH),
    ) as pipe:  # fmt: skip
        for _ in range(3):
            pipe.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))
        gc.collect()
        gc.disable()
        try:
            held.clear()
            pipe.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))
            assert straight[-1]
            assert len(held) == 4
            assert all(ref() is None for ref in held)
        finally:
            gc.enable()
