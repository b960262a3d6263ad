"""torch's DistributedDataParallel around a pipeline, one in each of two processes."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pykern
from tests import peers


def model() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())


def batch(rank: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))


def train(rank: int) -> list[Tensor]:
    with pykern.Pipeline(model(), devices="cpu:2", microbatches=2) as pipe:
        both = DistributedDataParallel(nn.Sequential(pipe, nn.Linear(4, 1)))
        optimizer = torch.optim.SGD(both.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            both(batch(rank)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in pipe.parameters()]


def test_gradients_are_those_of_all_processes() -> None:
    found = peers.run(2, train)
    layers = model()
    whole = nn.Sequential(layers, nn.Linear(4, 1))
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        whole(torch.cat([batch(0), batch(1)])).square().mean().backward()
        optimizer.step()
    for one, other, expected in zip(*found, layers.parameters(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, expected)
