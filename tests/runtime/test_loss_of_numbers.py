"""The loss of a step whose microbatches have plain losses on CPU workers."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import pykern
from pykern import schedules
from pykern.runtime.loss import Losses

same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)

NUMBERS = st.floats(allow_nan=False, width=32)


def by_torch(losses: Sequence[Tensor], weights: list[float]) -> Tensor:
    terms = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@given(values=st.lists(NUMBERS, min_size=1, max_size=9), weight=st.floats(0.0, 1.0))
@example(values=[3e38, 3e38, -3e38], weight=1.0)
@example(values=[1e-44, 3e-45, -1e-45], weight=0.5)
@example(values=[-0.0], weight=1.0)
def test_the_sum_has_the_bits_of_torch(
    dtype: torch.dtype, values: list[float], weight: float
) -> None:
    losses = [torch.tensor(value, dtype=dtype, requires_grad=True) for value in values]
    weights = [weight] * (len(values) - 1) + [1.0]
    ended = Losses(lambda output: output, None, weights, in_one_memory=True)
    for microbatch, loss in enumerate(losses):
        (kept,), (start,) = ended(microbatch, loss, True)
        assert kept is loss
        same(start, torch.tensor(weights[microbatch], dtype=dtype))
        same(ended.of(microbatch), loss.detach())
    same(ended.total(), by_torch([loss.detach() for loss in losses], weights))


@pytest.mark.parametrize("which", [0, 2, 3])
@pytest.mark.parametrize(
    "another", [torch.Tensor.double, torch.Tensor.bfloat16, lambda loss: loss.as_subclass(Mine)]
)
def test_losses_of_several_kinds_keep_their_types(
    another: Callable[[Tensor], Tensor], which: int
) -> None:
    losses = [torch.rand((), requires_grad=True) for _ in range(4)]
    losses[which] = another(losses[which])
    ended = Losses(lambda output: output, None, [0.25] * 4, in_one_memory=True)
    for microbatch, loss in enumerate(losses):
        _, (start,) = ended(microbatch, loss, True)
        assert start.dtype is loss.dtype
    for microbatch, loss in enumerate(losses):
        same(ended.of(microbatch), loss.detach())
    expected = (torch.stack([loss.detach() for loss in losses]) * 0.25).unbind()
    same(ended.total(), by_torch(expected, [1.0] * 4))


class Mine(Tensor):
    """A subclass, which may overload anything."""


def test_a_hook_may_write_into_the_gradient_of_a_loss() -> None:
    """As each loss starts from a tensor of its own, also where the losses are numbers."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    x = torch.randn(6, 4)

    def loss_fn(output: Tensor) -> Tensor:
        loss = output.square().mean()
        loss.register_hook(lambda gradient: gradient.mul_(2))
        return loss

    with pykern.Pipeline(
        torch.nn.Sequential(layer), devices="cpu:1", schedule=schedules.gpipe(1, 3), loss_fn=loss_fn
    ) as pipe:
        pipe.step(x)
    found, layer.weight.grad = layer.weight.grad, None
    for part in x.chunk(3):
        (loss_fn(layer(part)) / 3).backward()
    assert found is not None
    assert layer.weight.grad is not None
    assert torch.equal(found, layer.weight.grad)


@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.smooth_l1_loss, F.l1_loss])
def test_a_kept_loss_has_the_memory_of_a_number(loss_fn: Any) -> None:
    """torch's mean squared error has the memory of all squares, on any device."""
    outputs, targets = torch.randn(2, 3, 600, 512).unbind()
    losses = Losses(loss_fn, list(targets), [1.0] * 3)
    for microbatch, output in enumerate(outputs):
        losses(microbatch, output.requires_grad_(), True)
        kept = losses.of(microbatch)
        assert torch.equal(kept, loss_fn(output, targets[microbatch]).detach())
        assert kept.untyped_storage().nbytes() == 4
