"""Stages whose random numbers nobody watches any more, as it is known what they draw."""

from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern
from pykern.plan import Action, Kind, Placement, Plan
from pykern.runtime.random.draws import Draws
from pykern.runtime.random.seed import StepSeed, action_seed


def test_a_stage_is_known_when_nothing_is_left_to_watch() -> None:
    draws = Draws(0)
    draws.begin(StepSeed(), "train")
    assert draws.known() is None
    draws.generators[torch.default_generator] = torch.Generator()
    draws.watched(drew=True, num_seeds=1, only_seeds=True)
    assert draws.known() is None
    draws.watched(drew=True, num_seeds=1, only_seeds=False)
    assert draws.known() is not None
    draws.begin(StepSeed(), "train", compiled=True)
    assert draws.known() is None
    draws.begin(StepSeed(), "train")
    draws.generators.clear()
    assert draws.known() is None


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_microbatches_draw_their_own_numbers_in_any_order(
    recompute: Literal["none", "stage"],
) -> None:
    """The first F of the second step had the numbers of microbatch 0."""
    order = [2, 0, 1]
    rows = [
        [Action(kind, stage, microbatch) for kind in (Kind.F, Kind.B) for microbatch in order]
        for stage in range(2)
    ]
    first, x = nn.Linear(4, 4), torch.randn(6, 4)
    model = nn.Sequential(first, nn.Dropout(0.4), nn.Linear(4, 4), nn.Dropout(0.4))
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        schedule=Plan(Placement.linear(2), 3, rows),
        loss_fn=F.mse_loss,
        recompute=recompute,
    ) as pipe:
        for number in range(3):
            torch.manual_seed(number)
            step = int(torch.empty((), dtype=torch.int64).random_())
            expected = torch.zeros(())
            for microbatch, part in enumerate(x.split(2)):
                value = part
                for stage, of_stage in enumerate((model[:2], model[2:])):
                    torch.manual_seed(action_seed(step, stage, microbatch))
                    value = of_stage(value)
                expected += F.mse_loss(value, part) / 3
            (gradient,) = torch.autograd.grad(expected, first.weight)
            torch.manual_seed(number)
            pipe.zero_grad()
            torch.testing.assert_close(pipe.step(x, target=x), expected.detach())
            torch.testing.assert_close(first.weight.grad, gradient)
