"""Claim: replicas side by side cost their copies of layers and the sum of their gradients.

Forward and backward on as many workers in every contender: one pipeline of them, or replicas of
shorter ones. Baseline: one replica. Replicas have less bubble, since each pipeline is shorter; what
they pay is a copy of every layer in each step, which shares the originals' storage, and a sum for
each parameter and further replica.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn

import pykern
from pykern.models import gpt, next_token_loss

from .harness import Contender, Record, assert_same_answer, in_this_process, interleave, judge

_MICROBATCHES = 8

# Threads that have ended their last work spin for some milliseconds.
_SETTLE_S = 0.02


def tiny(_: bool) -> tuple[nn.Sequential, Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]]:
    """Layers that take a few microseconds each: what is left is the cost of running them."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    x, y = torch.randn(2, 2 * _MICROBATCHES, 16)
    return model, x, y, F.mse_loss


def small_gpt(smoke: bool) -> tuple[nn.Sequential, Tensor, Tensor, Callable[..., Tensor]]:
    """A model of 3.3 million parameters, to whose gradients further replicas add."""
    width, length = (16, 8) if smoke else (256, 128)
    ids = torch.randint(256, (2 * _MICROBATCHES, length + 1))
    model = gpt(vocab=256, layers=4, width=width, context=length)
    return model, ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), next_token_loss


@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", [tiny, small_gpt], ids=["tiny", "small GPT"])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_replicas(
    make: Callable[[bool], tuple[nn.Sequential, Tensor, Tensor, Callable[..., Tensor]]],
    num_devices: int,
    benchmark: BenchmarkFixture,
    smoke: bool,
    report: Callable[[list[Record]], None],
) -> None:
    """One, two, and as many replicas as there are devices."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x, y, loss_fn = make(smoke)

    def contender(replicas: int) -> Contender:
        pipe = pykern.Pipeline(
            copy.deepcopy(model),
            devices=f"cpu:{num_devices}",
            replicas=replicas,
            microbatches=_MICROBATCHES,
            balance="layers",
            loss_fn=loss_fn,
        )
        stages = num_devices // replicas
        name = f"{replicas} x {stages} stage{'s' if stages > 1 else ''}"
        return in_this_process(name, pipe, 1, lambda: pipe.step(x, target=y))

    contenders = [contender(replicas) for replicas in sorted({1, 2, num_devices})]
    assert_same_answer(contenders)
    samples = interleave(benchmark, contenders, 1 if smoke else 25, settle_s=_SETTLE_S)
    if smoke:
        return
    per_step = len(x)

    def figures(median_ms: float, one_ms: float) -> dict[str, float]:
        return {"rows/s": per_step / median_ms * 1e3, "speed-up": one_ms / median_ms}

    case = f"{make.__name__.replace('_', ' ')}, {num_devices} workers, {_MICROBATCHES} microbatches"
    report(judge("replicas", case, samples, contenders[0].name, figures))
