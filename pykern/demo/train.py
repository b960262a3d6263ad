"""The demo's training: one loop over steps of the pipeline, and the loss on text held out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..models import next_token_loss

if TYPE_CHECKING:
    from ..pipeline.pipeline import Pipeline

WARM_UP_SHARE = 0.1


def train(
    pipe: Pipeline, batches: Iterable[tuple[Tensor, Tensor]], steps: int, learning_rate: float
) -> Iterator[float]:
    """Train with AdamW: linear warm-up, then a cosine down to zero.

    Args:
        pipe: The model; its loss function is the one that is trained.
        batches: Input and target of each step.
        steps: Optimizer steps to take.
        learning_rate: The highest one, reached at the end of the warm-up.

    Yields:
        The loss of each step. The last one is timed on GPUs too.
    """
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    pipe.train()
    for number, (x, y) in enumerate(islice(batches, steps)):
        optimizer.zero_grad()
        with pipe.tracing() if number == steps - 1 else nullcontext():
            loss = pipe.step(x, target=y)
        torch.nn.utils.clip_grad_norm_(pipe.parameters(), max_norm=1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()


def _rate(step: int, steps: int) -> float:
    """Share of the highest learning rate at a step: 0...1."""
    warm_up = WARM_UP_SHARE * steps
    if step < warm_up:
        return (step + 1) / (warm_up + 1)
    return (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up))) / 2


def held_out_loss(pipe: Pipeline, x: Tensor, y: Tensor) -> float:
    """Loss in nats per byte of the model as it is, without training it.

    Args:
        pipe: The model, left in evaluation mode.
        x: [batch, seq], int64.
        y: [batch, seq], int64: the bytes that follow.
    """
    pipe.eval()
    with torch.no_grad():
        logits = pipe(x)
        return next_token_loss(logits, y.to(logits.device)).item()
