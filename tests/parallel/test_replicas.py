"""Replicas within each of two processes: sums within a process first, then those of processes."""

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import pykern
from pykern.plan import Kind
from tests import peers
from tests.parallel.reference import batch_of, layers

MICROBATCHES, REPLICAS, ROWS = 5, 2, 10
Trained = tuple[list[Tensor], list[Tensor]]


def ten_steps(rank: int, schedule: str) -> Trained:
    with pykern.Pipeline(
        nn.Sequential(*layers()),
        devices=f"cpu:{2 * REPLICAS}",
        schedule=schedule,
        replicas=REPLICAS,
        microbatches=MICROBATCHES,
        loss_fn=F.mse_loss,
        process_group=dist.group.WORLD,
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        losses = []
        for number in range(10):
            x, y = batch_of(number, rank, ROWS)
            losses.append(pipe.step(x, target=y))
            optimizer.step()
            optimizer.zero_grad()
        assert sum(span.action.kind is Kind.REDUCE for r in pipe.timeline().rows for span in r) == 2
        return losses, [parameter.detach() for parameter in pipe.parameters()]


def sums_of(model: nn.Module, microbatches: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of one replica's microbatches, in ascending order, and their losses."""
    model.zero_grad()
    losses = []
    for x, y in microbatches:
        loss = F.mse_loss(model(x), y)
        weight = len(x) / (2 * ROWS)
        loss.backward(torch.full_like(loss, weight))
        losses.append(loss.detach() * weight)
    return [parameter.grad.clone() for parameter in model.parameters()], losses  # type: ignore[union-attr]


def expected() -> Trained:
    model = nn.Sequential(*copy.deepcopy(layers()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    totals = []
    for number in range(10):
        of_processes, loss_of = [], []
        for rank in range(2):
            x, y = batch_of(number, rank, ROWS)
            parts = list(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True))
            found = [sums_of(model, parts[r::REPLICAS]) for r in range(REPLICAS)]
            (first, first_losses), (second, second_losses) = found
            of_processes.append([a + b for a, b in zip(first, second, strict=True)])
            losses = [torch.zeros(())] * MICROBATCHES
            losses[0::2], losses[1::2] = first_losses, second_losses
            loss_of.append(sum(losses[1:], losses[0]))
        totals.append(loss_of[0] + loss_of[1])
        for parameter, one, other in zip(model.parameters(), *of_processes, strict=True):
            parameter.grad = one + other
        optimizer.step()
    return totals, [parameter.detach() for parameter in model.parameters()]


def test_replicas_in_two_processes_train_as_one_bit_for_bit() -> None:
    wanted = expected()
    for schedule in ("one_f_one_b", "zb_h1"):
        for found in peers.run(2, ten_steps, schedule):
            for ours, theirs in zip(found, wanted, strict=True):
                assert all(map(torch.equal, ours, theirs)), schedule
