"""Tensors that go by way of the host, because GPUs do not reach each other's memory."""

import copy
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pykern
from pykern.plan import Kind
from tests.fake_cuda.fake import FakeCuda
from tests.support.comparison import assert_same_state
from tests.support.plain_step import plain_step

# 9 MiB a microbatch, in parts of 4, 4 and 1.
ROWS, WIDTH = 1, 9 * 2**18
PARTS = 3


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def two_steps(gpus: FakeCuda, capture: Literal[False, "step"]) -> tuple[list[float], int]:
    """The times of the last step's activations between the GPUs, in the fake's ns, and copies."""
    layers = nn.Sequential(Scale(), Scale())
    plain = copy.deepcopy(layers)
    x = torch.randn(2 * ROWS, WIDTH)
    with pykern.Pipeline(
        layers,
        devices=["cuda:0", "cuda:1"],
        schedule="one_f_one_b",
        microbatches=2,
        loss_fn=mse_loss,
        capture=capture,
    ) as pipe:
        before = 0
        for _ in range(2):
            before = gpus.calls("cuMemcpyAsync")
            # A graph of the whole step has no times within it.
            if capture == "step":
                pipe.step(x, target=x)
            else:
                with pipe.tracing():
                    pipe.step(x, target=x)
        copies = gpus.calls("cuMemcpyAsync") - before
        spans = [] if capture == "step" else [s for row in pipe.copies().rows for s in row]
        for _ in range(2):
            plain_step(plain, x, x, mse_loss, 2, pipe.partition.stages)
        assert_same_state(pipe, plain)
    return [s.end_ns - s.start_ns for s in spans if s.action.kind is Kind.COPY_F], copies


@pytest.mark.parametrize("capture", [False, "step"])
def test_a_long_tensor_leaves_and_lands_at_the_same_time(
    gpus: FakeCuda, capture: Literal[False, "step"]
) -> None:
    direct, straight = two_steps(gpus, capture)
    gpus.set_peer(0, 1, reachable=False)
    gpus.set_peer(1, 0, reachable=False)
    with pytest.warns(UserWarning, match="do not reach each other's memory"):
        by_host, in_parts = two_steps(gpus, capture)
    if capture == "step":
        return
    # Two microbatches, each with an activation and a gradient, each copy in parts of two halves.
    assert in_parts - straight == 2 * 2 * (2 * PARTS - 1)
    # The last part lands when 4 + 4 + 4 + 1 MiB have gone; as a whole, after 9 + 9.
    for ours, theirs in zip(by_host, direct, strict=True):
        assert theirs < ours < 1.5 * theirs
