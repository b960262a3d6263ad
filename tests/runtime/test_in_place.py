"""In-place layers of a chain: their stage copies what it is given, where they would write that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.runtime.autograd.cut import copies
from pykern.runtime.stage import in_place
from pykern.schedules import gpipe, one_f_one_b
from tests.runtime.hard_layers import linear
from tests.support.comparison import assert_same_state
from tests.support.pipelines import planned
from tests.support.plain_step import plain_step


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The values that stages have copied."""
    found: list[Any] = []

    def noted(value: Any) -> Any:
        found.append(value)
        return copies(value)

    monkeypatch.setattr(in_place, "copies", noted)
    return found


def behind() -> nn.Sequential:
    return nn.Sequential(linear(), nn.ReLU(inplace=True))


def in_front() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.ReLU(inplace=True), linear())


def check_step(pipe: Any, plain: nn.Sequential, num_microbatches: int) -> None:
    """The loss and gradients of the plain model, and a batch as it was."""
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    given = x.clone()
    # The plain model writes its batch.
    expected = plain_step(plain, given, y, F.mse_loss, num_microbatches, pipe.partition.stages)
    given = x.clone()
    assert torch.equal(pipe.step(x, target=y), expected)
    assert torch.equal(x, given)
    assert_same_state(pipe, plain)


@pytest.mark.parametrize("recompute", [None, "layer", "stage"])
def test_layers_that_write_their_own_values_get_copies_once(
    copied: list[Any], recompute: Any
) -> None:
    relu = nn.ReLU(inplace=True)
    model = nn.Sequential(behind(), nn.Sequential(linear(), relu))
    plain = copy.deepcopy(model)
    with planned(model, gpipe(2, 3), recompute=recompute) as pipe:
        for _ in range(3):
            check_step(pipe, plain, 3)
        # The first forward of each stage.
        assert len(copied) == 2
        relu.inplace = False
        check_step(pipe, plain, 3)
        relu.inplace = True
        check_step(pipe, plain, 3)
        # A change lets all forwards of the stage be watched anew.
        assert len(copied) == 3


@pytest.mark.parametrize("recompute", [None, "layer", "stage"])
def test_layers_that_write_what_the_stage_is_given_get_copies_always(
    copied: list[Any], recompute: Any
) -> None:
    model = nn.Sequential(in_front(), in_front())
    plain = copy.deepcopy(model)
    with planned(model, one_f_one_b(2, 3), recompute=recompute) as pipe:
        for step in range(1, 4):
            check_step(pipe, plain, 3)
            assert len(copied) >= 2 * 3 * step


def test_a_mode_in_which_layers_begin_to_write_has_copies() -> None:
    """In eval mode a dropout gives its input back, and writes nothing."""
    model = nn.Sequential(nn.Sequential(nn.Dropout(0.5, inplace=True), linear()), behind())
    plain = copy.deepcopy(model)
    with planned(model, gpipe(2, 3)) as pipe:
        for mode in (False, True, False, True):
            pipe.train(mode)
            plain.train(mode)
            check_step(pipe, plain, 3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_batch_stays_as_it_was_in_calls_without_gradients(mode: Callable[[], Any]) -> None:
    """Also in inference mode, where nothing counts writes, and in steps after such calls."""
    model = nn.Sequential(in_front(), behind())
    plain = copy.deepcopy(model)
    x = torch.randn(6, 6)
    given = x.clone()
    with planned(model, gpipe(2, 3)) as pipe:
        with mode():
            for _ in range(3):
                assert torch.equal(pipe(x), plain(given.clone()))
                assert torch.equal(x, given)
        for _ in range(2):
            check_step(pipe, plain, 3)


class Steered(nn.Module):
    """Writes its input where it is told to."""

    inplace = True

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor, write: bool) -> Tensor:
        y: Tensor = self.linear(F.relu(x, inplace=write))
        return y


def test_values_beside_tensors_that_have_layers_write_bring_copies() -> None:
    model = nn.Sequential(Steered(), behind())
    x, y = torch.randn(6, 6), torch.randn(6, 6)
    given = x.clone()
    with planned(model, gpipe(2, 3)) as pipe:
        losses = [pipe.step(x, write, target=y) for write in (False, True, False, True)]
    assert torch.equal(x, given)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
