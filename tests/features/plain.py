"""The reference of features: the model alone, microbatch by microbatch."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import pykern
from pykern.runtime.microbatch import sizes, split
from tests.support.comparison import assert_same_gradients
from tests.support.pipelines import small

NUM_MICROBATCHES = 4


def chain(num_layers: int = 4, width: int = 8) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_layers))
    )


def pipeline(model: Any, **options: Any) -> pykern.Pipeline:
    return small(model, **({"microbatches": NUM_MICROBATCHES} | options))


def plain_step(
    call: Callable[..., Any], loss_fn: Callable[..., Tensor], args: Sequence[Any], target: Tensor
) -> Tensor:
    """Loss of the batch; gradients are added to `.grad`."""
    rows = [n for n in sizes(len(target), NUM_MICROBATCHES) if n]
    losses = []
    for part, wanted in zip(split(tuple(args), rows), target.split(rows), strict=True):
        loss = loss_fn(call(*part), wanted) * (len(wanted) / len(target))
        loss.backward()
        losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def assert_trains_alike(
    model: Any, args: Sequence[Any], target: Tensor, loss_fn: Callable[..., Tensor], **options: Any
) -> None:
    """A step gives the plain model's loss and gradients, bit for bit."""
    plain = copy.deepcopy(model)
    module = plain if isinstance(plain, nn.Module) else nn.Sequential(*plain)
    with pipeline(model, loss_fn=loss_fn, **options) as pipe:
        ours = pipe.step(*args, target=target)
        assert torch.equal(ours, plain_step(module, loss_fn, args, target))
        assert_same_gradients(pipe, module)
