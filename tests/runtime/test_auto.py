"""Training by a plan that the search made."""

import torch
import torch.nn.functional as F
from torch import nn

import pykern


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
