"""Training by a plan that the search made."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pykern
from pykern.pipeline.auto_costs import costs_of
from pykern.plan import Costs
from pykern.search import search


def gradients(layers):
    return [parameter.grad.clone() for layer in layers for parameter in layer.parameters()]


def test_auto_trains_as_the_plain_model_does():
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(8)]
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    plain = nn.Sequential(*layers)
    losses = [F.mse_loss(plain(a), b) / 4 for a, b in zip(x.split(2), y.split(2), strict=True)]
    for loss in losses:
        loss.backward()
    expected = gradients(layers)
    plain.zero_grad()
    with pykern.Pipeline(
        layers,
        devices="cpu:2",
        schedule="auto",
        microbatches=4,
        loss_fn=F.mse_loss,
        memory=0.75,
        budget_ms=5,
    ) as pipe:
        pipe.step(x, target=y)
        assert pipe.plan.num_stages > 2
    for found, wanted in zip(gradients(layers), expected, strict=True):
        assert torch.equal(found, wanted)


def test_auto_makes_no_more_stages_than_there_are_layers():
    with pykern.Pipeline(
        [nn.Linear(2, 2) for _ in range(3)], devices="cpu:2", schedule="auto", microbatches=2
    ) as pipe:
        assert pipe.plan.num_stages == 2


def uneven() -> nn.Sequential:
    """One layer takes about as long as all others."""
    layers = [nn.Linear(16, 16) for _ in range(6)]
    wide = nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 16))
    return nn.Sequential(*layers, wide)


def test_auto_uses_the_times_of_layers_if_the_cut_does(monkeypatch: pytest.MonkeyPatch):
    seen = []
    plain = search.auto

    def auto(*args, costs, **more):
        seen.append(costs)
        return plain(*args, costs=costs, **more)

    monkeypatch.setattr(search, "auto", auto)
    x = torch.randn(64, 16)
    with pykern.Pipeline(
        uneven(),
        devices="cpu:2",
        schedule="auto",
        microbatches=4,
        loss_fn=F.mse_loss,
        balance="time",
        sample=x[:16],
        budget_ms=5,
    ) as pipe:
        pipe.step(x, target=x)
    [costs] = seen
    found = costs(7)
    assert max(found.forward_ns) == found.forward_ns[6]
    assert found.forward_ns[6] > 3 * max(found.forward_ns[:6])


def test_costs_that_are_given_are_the_costs():
    given = Costs(1.0, 2.0)
    with pykern.Pipeline(
        uneven(),
        devices="cpu:2",
        schedule="auto",
        microbatches=4,
        balance="time",
        sample=torch.randn(4, 16),
        costs=given,
        budget_ms=5,
        loss="inside",
    ) as pipe:
        expected = search.auto(2, 4, costs=given, budget_ms=5, max_chunks=3)
        assert pipe.plan.rows == expected.plan.rows


def test_stages_of_any_number_share_the_times():
    costs = costs_of([30, 30, 60, 120])
    assert costs(2) == Costs([40.0, 40.0], [80.0, 80.0], 0.0)
    assert costs(4) == Costs([10.0, 10.0, 20.0, 40.0], [20.0, 20.0, 40.0, 80.0], 0.0)
