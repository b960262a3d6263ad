"""The driver's cost of a step, without a clock: the calls of it for each microbatch and tensor.

A row is for one way of issuing steps. A number that falls may be lowered here; one that rises has
to be found.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from tests.fake_cuda.fake import FakeCuda
from tests.fake_cuda.host_gpus import host_gpus

WIDTH = 8
_API = Path(__file__).parents[2] / "csrc/cuda/api.hpp"
_FUNCTIONS = re.findall(r"\bX\((cu\w+)", _API.read_text())


class Fan(nn.Module):
    """Hands several tensors to the next layer."""

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.num_tensors = num_tensors

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        return tuple(y * number for number in range(self.num_tensors))


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        joined: Tensor = self.linear(torch.stack(given).sum(0))
        return joined


def _calls_on(
    gpus: FakeCuda, capture: Any, num_microbatches: int, num_tensors: int
) -> Counter[str]:
    """The calls of the fourth step of two stages on two GPUs, by function of the driver."""
    x, y = torch.randn(2, 2 * num_microbatches, WIDTH)
    with pykern.Pipeline(
        nn.Sequential(Fan(num_tensors), Join()),
        devices=["cuda:0", "cuda:1"],
        schedule="one_f_one_b",
        microbatches=num_microbatches,
        loss_fn=F.mse_loss,
        capture=capture,
    ) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        before = Counter({name: gpus.calls(name) for name in _FUNCTIONS})
        pipe.step(x, target=y)
        return Counter({name: gpus.calls(name) for name in _FUNCTIONS}) - before


def calls_of(capture: Any, num_microbatches: int, num_tensors: int) -> Counter[str]:
    """The same, on GPUs of their own: tensors of another pipeline may return at an address."""
    with host_gpus(2) as gpus:
        return _calls_on(gpus, capture, num_microbatches, num_tensors)


# A microbatch is an F and a B of each stage, and two copies, of which each moves a tensor. Actions
# and copies that follow each other on one GPU share a current context; an action that is called may
# change it.
EVENTS = {"cuStreamWaitEvent": 4, "cuEventRecord": 4}


@pytest.mark.parametrize(
    ("capture", "by_microbatch", "by_tensor"),
    [
        pytest.param(
            False,
            {"cuCtxSetCurrent": 3, "cuCtxGetCurrent": 4, **EVENTS, "cuMemcpyAsync": 2},
            {"cuMemcpyAsync": 1},
            id="called",
        ),
        pytest.param(
            True,
            {"cuCtxSetCurrent": 3, **EVENTS, "cuMemcpyAsync": 5, "cuGraphLaunch": 4},
            {"cuMemcpyAsync": 1},
            id="replayed",
        ),
        pytest.param("step", {}, {}, id="as one graph"),
    ],
)
def test_steps_call_the_driver_no_more_than_they_need(
    capture: Any, by_microbatch: dict[str, int], by_tensor: dict[str, int]
) -> None:
    few = calls_of(capture, 4, 1)
    # Four microbatches more; then two tensors more, in four microbatches, forth and back.
    microbatches = calls_of(capture, 8, 1) - few
    tensors = calls_of(capture, 4, 3) - few
    assert microbatches == {name: 4 * number for name, number in by_microbatch.items()}
    assert tensors == {name: 2 * 4 * 2 * number for name, number in by_tensor.items()}
