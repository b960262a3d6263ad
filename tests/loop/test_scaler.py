"""Loss scaling by torch.amp.GradScaler: as in the plain loop, to the bit."""

from typing import Any

import pytest
import torch
from torch import nn

from pykern.kernels.head_loss import LinearCrossEntropy
from tests.fake_cuda.fake import FakeCuda
from tests.loop.loops import assert_same, batch, mlp, pipeline, plain_loop_step, twins
from tests.runtime.test_loss_in_one_pass import Counting
from tests.runtime.test_loss_in_one_pass import batch as head_batch
from tests.runtime.test_loss_in_one_pass import model as head_model


def scalers(**options: Any) -> tuple[torch.amp.GradScaler, torch.amp.GradScaler]:
    return torch.amp.GradScaler("cpu", **options), torch.amp.GradScaler("cpu", **options)


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zb_h1"])
def test_half_precision_steps_equal_the_plain_loop_and_overflows_are_left_out(
    schedule: str,
) -> None:
    model, plain = twins(mlp(8))
    ours, theirs = scalers(init_scale=2.0**12, growth_interval=3)
    scales = []
    with pipeline(model, schedule=schedule) as pipe:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (pipe, plain)]
        for number in range(12):
            x, y = batch()
            if number == 5:
                y *= 3e7  # float16 gradients overflow
            before = pipe.get_parameter("0.weight").clone()
            with torch.autocast("cpu", torch.float16):
                loss = pipe.step(x, target=y, scaler=ours)
                expected = plain_loop_step(plain, x, y, scaler=theirs)
            for scaler, optimizer in zip((ours, theirs), optimizers, strict=True):
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert ours.get_scale() == theirs.get_scale()
            scales.append(ours.get_scale())
            assert_same(pipe, plain, (loss, expected))
            assert torch.equal(before, pipe.get_parameter("0.weight")) == (number == 5)
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert scales[4] == 2.0**13
    assert scales[5] == 2.0**12


def test_a_loss_in_half_precision_rounds_as_in_the_plain_loop() -> None:
    """A scale and weights that are not powers of two, and a loss of 10 bits."""
    model, plain = twins(mlp().half())
    ours, theirs = scalers(init_scale=1000.7)
    x, y = (tensor.half() for tensor in batch())
    with pipeline(model) as pipe:
        loss = pipe.step(x, target=y, scaler=ours)
        assert loss.dtype == torch.float16
        assert_same(pipe, plain, (loss, plain_loop_step(plain, x, y, scaler=theirs)))


def test_a_loss_that_does_its_backward_at_once_is_scaled_too() -> None:
    model, plain = twins(head_model())
    ours, theirs = scalers(init_scale=1000.7)
    loss_fn = Counting()
    x, y = head_batch()
    with pipeline(model, loss_fn=loss_fn) as pipe:
        for _ in range(2):
            loss = pipe.step(x, target=y, scaler=ours)
            expected = plain_loop_step(plain, x, y, scaler=theirs, loss_fn=LinearCrossEntropy())
            assert_same(pipe, plain, (loss, expected))
    assert loss_fn.count == 6


def test_recomputed_stages_scale_once() -> None:
    model, plain = twins(mlp())
    ours, theirs = scalers()
    with pipeline(model, recompute="stage") as pipe:
        for _ in range(2):
            x, y = batch()
            loss = pipe.step(x, target=y, scaler=ours)
            assert_same(pipe, plain, (loss, plain_loop_step(plain, x, y, scaler=theirs)))


def test_a_scaler_that_is_off_does_nothing() -> None:
    model, plain = twins(mlp())
    x, y = batch()
    with pipeline(model) as pipe:
        loss = pipe.step(x, target=y, scaler=torch.amp.GradScaler("cpu", enabled=False))
        assert_same(pipe, plain, (loss, plain_loop_step(plain, x, y)))


def test_anything_else_is_refused() -> None:
    x, y = batch()
    model: nn.Sequential = mlp()
    with pipeline(model) as pipe, pytest.raises(TypeError, match="GradScaler, got a float"):
        pipe.step(x, target=y, scaler=1024.0)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("capture", [False, True])
def test_gpus_and_replayed_graphs_follow_the_scale(gpus: FakeCuda, capture: bool) -> None:
    model, plain = twins(mlp(4))
    ours, theirs = scalers(init_scale=64.0, growth_interval=1)
    options: dict[str, Any] = {"devices": ["cuda:0", "cuda:1"], "microbatches": 2}
    with pipeline(model, **options, capture=capture) as pipe:
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (pipe, plain)]
        for _ in range(4):
            x, y = batch(6)
            loss = pipe.step(x, target=y, scaler=ours)
            expected = plain_loop_step(plain, x, y, num_microbatches=2, scaler=theirs)
            assert_same(pipe, plain, (loss, expected))
            for scaler, optimizer in zip((ours, theirs), optimizers, strict=True):
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        assert ours.get_scale() == 1024.0
        assert (gpus.calls("cuGraphLaunch") > 0) == capture


def test_a_captured_step_knows_whether_there_is_a_scale(gpus: FakeCuda) -> None:
    model, plain = twins(mlp(4))
    ours, theirs = scalers(init_scale=64.0)
    options: dict[str, Any] = {"devices": ["cuda:0", "cuda:1"], "microbatches": 2}
    x, y = batch(6)
    with pipeline(model, **options, capture="auto") as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            plain_loop_step(plain, x, y, num_microbatches=2)
        launched = gpus.calls("cuGraphLaunch")
        assert launched > 0
        with pytest.warns(UserWarning, match="not what was captured"):
            pipe.step(x, target=y, scaler=ours)
        plain_loop_step(plain, x, y, num_microbatches=2, scaler=theirs)
        assert gpus.calls("cuGraphLaunch") == launched
        assert_same(pipe, plain)
