"""Shared by the tests of losses outside of pipelines."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import pykern
from pykern import schedules
from pykern.plan import Plan
from tests.support.plain_step import rows_of

WIDTH = 6
MICROBATCHES = 3


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            for _ in "1234"
        )
    )


def pipeline(layers: Any, plan: Plan | None = None, **options: Any) -> pykern.Pipeline:
    plan = schedules.one_f_one_b(2, MICROBATCHES) if plan is None else plan
    return pykern.Pipeline(
        layers, devices=f"cpu:{plan.num_devices}", schedule=plan, balance="layers", **options
    )


def batch(rows: int = 7) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))


def plain(layers: nn.Module, x: Tensor, num_microbatches: int, loss_fn: Any) -> Tensor:
    """Loss of the plain model; gradients are added as a pipeline's: complete, microbatch first."""
    before = [parameter.grad for parameter in layers.parameters()]
    for parameter in layers.parameters():
        parameter.grad = None
    parts = [part.detach() for part in x.split(rows_of(len(x), num_microbatches))]
    inputs = [part.requires_grad_(x.requires_grad) for part in parts]
    outputs = [layers(part) for part in inputs]
    ends = [output.detach().requires_grad_() for output in outputs]
    loss: Tensor = loss_fn(torch.cat(ends))
    loss.backward()
    for output, end in zip(outputs, ends, strict=True):
        output.backward(end.grad)
    for parameter, old in zip(layers.parameters(), before, strict=True):
        if old is not None and parameter.grad is not None:
            parameter.grad = old + parameter.grad
    if x.requires_grad:
        x.grad = torch.cat([part.grad for part in inputs if part.grad is not None])
    return loss.detach()


def mean_square(y: Tensor) -> Tensor:
    return y.square().mean()


def assert_gradients(one: nn.Module, other: nn.Module) -> None:
    """All have one, and that of the other's parameter at the same place, whatever its name."""
    pairs = zip(one.named_parameters(), other.parameters(), strict=True)
    for (name, mine), theirs in pairs:
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        assert torch.equal(mine.grad, theirs.grad), name


def require_the_bits(pipe: pykern.Pipeline, layers: nn.Module) -> None:
    """Two calls lead to the loss and gradients of the plain model."""
    reference = copy.deepcopy(layers)
    for _ in range(2):
        x, x_reference = batch().requires_grad_(), batch().requires_grad_()
        loss = mean_square(pipe(x))
        loss.backward()
        expected = plain(reference, x_reference, pipe.plan.num_microbatches, mean_square)
        assert torch.equal(loss, expected)
        assert_gradients(layers, reference)
        assert x.grad is not None
        assert x_reference.grad is not None
        assert torch.equal(x.grad, x_reference.grad)
