"""The caller's default device holds none of pykern's tensors; here it is one without values."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

import pykern
from pykern.parallel.peers.texts import text_of, texts_of_all
from tests.support.comparison import assert_same_state
from tests.support.pipelines import small
from tests.support.plain_step import plain_step


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4), nn.Tanh())


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"schedule": "zb_h1"}, {"recompute": "layer"}, {"verify": True}],
    ids=str,
)
def test_a_step(options: dict[str, Any]) -> None:
    layers = model()
    plain = copy.deepcopy(layers)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    # Two microbatches of two rows: a sum of means is twice their mean.
    scale = 2 if "reduction" in options else 1
    with small(layers, **options) as pipe:
        with torch.device("meta"):
            loss = pipe.step(x, target=y)
        expected = plain_step(plain, x, y, lambda a, b: F.mse_loss(a, b) * scale, 2)
        assert torch.equal(loss, expected)
        assert_same_state(pipe, plain)


def steps_on_the_host(pipe: pykern.Pipeline, x: Tensor) -> list[Tensor]:
    """Steps optimizers that count on the default device, Adagrad when made, others in `step`."""
    for optimizer_class in (torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad):
        optimizer = pykern.HostOptimizer(pipe, optimizer_class)
        pipe.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in pipe.parameters()]


@pytest.mark.parametrize(
    "use",
    [
        steps_on_the_host,
        lambda pipe, x: pipe.map(F.mse_loss, x, target=x),
        lambda pipe, x: list(pipe.stream([x, x])),
        lambda pipe, x: pipe.profile(x, target=x, steps=1) and [],
    ],
    ids=["HostOptimizer", "map", "stream", "profile"],
)
def test_other_uses(use: Callable[[pykern.Pipeline, Tensor], Any]) -> None:
    layers, x = model(), torch.randn(4, 4)
    found = []
    for device in ("cpu", "meta"):
        with small(copy.deepcopy(layers)) as pipe, torch.device(device):
            found.append(use(pipe, x))
    assert all(map(torch.equal, *found))


def test_processes_talk_on_the_host() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        with torch.device("meta"):
            assert text_of("a", group, 0) == "a"
            assert texts_of_all("b", group) == ["b"]
    finally:
        dist.destroy_process_group()
