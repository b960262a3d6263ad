"""Captures that are refused, each by its cause. Run by test_device_oracle.py."""

import copy
import re
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import pykern
from pykern.runtime.gpu.capture.refusals import CannotCapture
from tests.device_oracle.captures_on_gpus import assert_alike
from tests.device_oracle.steps_on_gpus import TWO, WIDTH, mlp
from tests.fake_cuda.fake import FakeCuda
from tests.runtime.test_failed_backward import Branches
from tests.support.plain_step import plain_step


class Late(nn.Linear):
    """Waits for the GPU where it is told to."""

    waits = False

    def forward(self, x: Tensor) -> Tensor:
        if self.waits and x.sum().item() > 1e9:
            return x
        return super().forward(x)


def test_a_stage_that_waits_is_refused_and_steps_go_on(four_gpus: FakeCuda) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Late(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(layers)
    layers[1].waits = True  # type: ignore[assignment]
    x = torch.randn(16, WIDTH)
    options: dict[str, Any] = {"devices": TWO, "microbatches": 4, "loss_fn": mse_loss}
    with pykern.Pipeline(layers, **options, capture=True) as pipe:
        pipe.step(x, target=x)
        with pytest.raises(CannotCapture, match=r"Late .* cannot be captured: .*not permitted"):
            pipe.step(x, target=x)
        layers[1].waits = False  # type: ignore[assignment]
        pipe.zero_grad()
        for _ in range(3):
            expected = plain_step(plain, x, x, mse_loss, 4, pipe.partition.stages)
            assert torch.equal(pipe.step(x, target=x).cpu(), expected)
            assert_alike(pipe, plain)
        assert four_gpus.calls("cuGraphLaunch") > 0


def test_layers_that_draw_are_refused(four_gpus: FakeCuda) -> None:
    layers = nn.Sequential(*mlp(), nn.Dropout(0.5))
    x = torch.randn(16, WIDTH)
    with pykern.Pipeline(
        layers, devices=TWO, microbatches=4, loss_fn=mse_loss, capture=True
    ) as pipe:
        pipe.step(x, target=x)
        with pytest.raises(CannotCapture, match="draws random numbers"):
            pipe.step(x, target=x)


def test_a_held_output_is_named_where_it_breaks_a_capture(four_gpus: FakeCuda) -> None:
    x = torch.randn(16, WIDTH)
    options: dict[str, Any] = {"devices": TWO, "microbatches": 4, "loss_fn": mse_loss}
    with pykern.Pipeline(mlp(), **options, capture=True) as pipe:
        pipe.step(x, target=x)
        held = pipe(x)
        with pytest.raises(CannotCapture, match="in a graph that is still held") as raised:
            pipe.step(x, target=x)
        # The engine would have the capture wait for the caller's stream, or that for the capture.
        told = str(raised.value.__cause__)
        assert re.search("stale reference|not captured|default stream", told)
        # The error's traceback holds the graph, too.
        del held, raised
        pipe.step(x, target=x)
        assert four_gpus.calls("cuGraphLaunch") > 0


def test_a_capture_that_fails_in_a_backward_is_told_again(four_gpus: FakeCuda) -> None:
    """A graph that torch's engine still held would be named in its place."""
    layers = mlp()
    branches = layers[-1] = Branches(WIDTH, fails=False)
    x = torch.randn(16, WIDTH)
    options: dict[str, Any] = {"devices": TWO, "microbatches": 4, "loss_fn": mse_loss}
    with pykern.Pipeline(layers, **options, capture=True) as pipe:
        pipe.step(x, target=x)
        for branches.fails[0] in (True, True, False):
            told = r"B of .* cannot be captured: planted"
            fails = pytest.raises(CannotCapture, match=told) if branches.fails[0] else nullcontext()
            with fails:
                pipe.step(x, target=x)
        assert four_gpus.calls("cuGraphLaunch") > 0
