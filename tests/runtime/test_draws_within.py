"""Draws within something else: a layer of another pipeline, a transform of torch.func."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.runtime.test_random import Calls


def test_a_pipeline_in_a_layer_draws_by_the_state_of_the_action_around_it() -> None:
    inner = pykern.Pipeline([nn.Dropout(0.5), nn.Dropout(0.5)], devices="cpu:2", microbatches=2)
    layers = [nn.Dropout(0.5), Calls(inner.forward)]
    results = []
    with inner, pykern.Pipeline(layers, devices="cpu:2", microbatches=2) as outer:
        for _ in range(3):
            torch.manual_seed(7)
            results.append((outer(torch.ones(4, 64)), torch.rand(())))
    torch.manual_seed(7)
    torch.empty((), dtype=torch.int64).random_()
    after = torch.rand(())
    for output, number in results:
        assert torch.equal(output, results[0][0])
        assert torch.equal(number, after)


@pytest.mark.parametrize("draws", [partial(F.dropout, p=0.5), lambda x: x * torch.rand_like(x)])
@pytest.mark.parametrize("around", [nn.Dropout(0.1), nn.ReLU()])
def test_recompute_repeats_draws_within_a_layer_that_draws(
    around: nn.Module, draws: Callable[[Tensor], Tensor]
) -> None:
    """One takes a generator, one does not; a layer of another pipeline steps the one that draws."""
    x = torch.randn(8, 8)
    found = []
    for recompute in ("none", "layer", "stage"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), Calls(draws), nn.Tanh(), nn.Linear(8, 8))
        options: dict[str, Any] = {"microbatches": 2, "loss_fn": F.mse_loss}
        with pykern.Pipeline(model, devices="cpu:2", recompute=recompute, **options) as inner:

            def step(x: Tensor, inner: pykern.Pipeline = inner) -> Tensor:
                with torch.enable_grad():
                    return inner.step(x.detach(), target=x.detach())

            layers = [nn.Linear(8, 8), around, Calls(lambda x: x + step(x))]
            with pykern.Pipeline(layers, devices="cpu:1", **options) as outer:
                losses = [outer.step(x, target=x) for _ in range(3)]
        gradients = [held.grad for held in model.parameters()]
        found.append([*losses, *(one for one in gradients if one is not None)])
        assert len(found[-1]) == 3 + 4
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_the_first_draw_of_a_step_may_be_within_vmap() -> None:
    def each(x: Tensor) -> Tensor:
        found: Tensor = torch.vmap(partial(F.dropout, p=0.5), randomness="different")(x)
        return found

    x = torch.ones(4, 64)
    outputs = []
    for first in (nn.Identity(), nn.Dropout(0.5)):
        with pykern.Pipeline([first, Calls(each)], devices="cpu:2", microbatches=2) as pipe:
            outputs.append(pipe(x))
    assert all(0 < (y == 0).sum() < y.numel() for y in outputs)
