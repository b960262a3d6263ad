"""Data-parallel pipelines of the model of `reference`, and runs of them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import pykern
from tests.parallel.reference import batch_of, layers, train
from tests.support.pipelines import small

NUM_MICROBATCHES = 4


def pipeline(
    model: nn.Module | Sequence[nn.Module] | None = None, **options: Any
) -> pykern.Pipeline:
    """A pipeline of all processes, unless options say otherwise."""
    usual = {"microbatches": NUM_MICROBATCHES, "process_group": dist.group.WORLD}
    return small(model or nn.Sequential(*layers()), **(usual | options))


def ten_steps(
    rank: int,
    rows: Sequence[int],
    make: Callable[[pykern.Pipeline], Optimizer],
    options: dict[str, Any],
    every: int,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and parameters after ten steps, with an update after each `every` of them."""
    with pipeline(**options) as pipe:

        def step(number: int) -> Tensor:
            x, y = batch_of(number, rank, rows[rank])
            with pipe.no_sync() if (number + 1) % every else nullcontext():
                return pipe.step(x, target=y)

        losses = train(step, make(pipe), 10, every)
        return losses, {name: value.detach() for name, value in pipe.named_parameters()}
