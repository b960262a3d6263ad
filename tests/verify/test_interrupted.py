"""An interrupt at any line of a verified step: the next has the bits of a fresh pipeline's."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.diagonal import nightly
from tests.interrupts import at_every_line
from tests.verify.broken import WIDTH, WritesBufferInBackward

X, Y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)


class Own(nn.Module):
    """A forward of its own, in which two stages share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.b(self.drop(self.a(x)).tanh()))
        return y


SETTINGS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "own": (Own, {"sample": X[:2], "split_at": ["b"]}),
    "chain": (
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 8)),
        {"deferred_batch_norm": True},
    ),
    "differs": (
        lambda: nn.Sequential(WritesBufferInBackward(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        {},
    ),
}


def open_pipeline(name: str) -> pykern.Pipeline:
    torch.manual_seed(0)
    make, options = SETTINGS[name]
    settings: dict[str, Any] = {"devices": "cpu:2", "microbatches": 3, "verify": 1}
    settings["loss_fn"] = F.mse_loss
    return pykern.Pipeline(make(), **(settings | options))


def step(pipe: pykern.Pipeline) -> list[Tensor]:
    """The results of a step, and the state behind it, also where it differs."""
    try:
        made = [pipe.step(X, target=Y)]
    except pykern.VerifyError as error:
        made = [torch.tensor(len(error.differences)), torch.tensor(error.origin.boundary)]
    gradients = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
    return [*made, *gradients, *(b.clone() for b in pipe.buffers()), torch.get_rng_state()]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "stride"),
    [("own", 241), ("chain", 101), ("differs", 601), *(nightly(n, 1) for n in SETTINGS)],
)
def test_the_next_step_is_that_of_a_fresh_pipeline(name: str, stride: int) -> None:
    def prepare(pipe: pykern.Pipeline) -> None:
        pipe.load_state_dict(state)
        pipe.zero_grad()
        torch.manual_seed(1)

    with open_pipeline(name) as fresh, open_pipeline(name) as pipe:
        state = copy.deepcopy(fresh.state_dict())
        hooks = [len(module._forward_pre_hooks) for module in fresh.modules()]
        prepare(fresh)
        expected = step(fresh)
        prepare(pipe)
        step(pipe)

        def act() -> Callable[[], object]:
            prepare(pipe)
            return lambda: step(pipe)

        def check(where: str) -> None:
            assert [len(module._forward_pre_hooks) for module in pipe.modules()] == hooks, where
            assert not nn.modules.module._global_forward_pre_hooks, where
            prepare(pipe)
            made = step(pipe)
            assert len(made) == len(expected), where
            assert all(map(torch.equal, made, expected)), where

        times = at_every_line(act, check, stride)
    assert times > 5
