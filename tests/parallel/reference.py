"""Training of one model by several processes, written without pykern: what theirs is compared with.

Each process adds up the gradients of its microbatches in ascending order; the sums of processes are
added in the order of their ranks.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]


def layers(width: int = 6, num_layers: int = 4) -> list[nn.Module]:
    """A small model, the same in every process."""
    torch.manual_seed(7)
    blocks: list[nn.Module] = []
    for _ in range(num_layers):
        blocks.append(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Tanh()))
    return blocks


def batch_of(step: int, rank: int, rows: int, width: int = 6) -> Batch:
    """The batch of a process in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(rows, width, generator=generator)
    return inputs, torch.randn(rows, width, generator=generator)


class Reference:
    """The model in one process, unpipelined, fed with what all processes get.

    Args:
        model: its parameters are trained.
        num_microbatches: that each process cuts its batch into.
        reduction: "mean" over the rows of all, or "sum".
    """

    def __init__(
        self, model: nn.Module, num_microbatches: int, loss_fn: Loss, reduction: str = "mean"
    ) -> None:
        self.model = model
        self.num_microbatches = num_microbatches
        self.loss_fn = loss_fn
        self.reduction = reduction

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Adds to `.grad` what one batch for each process gives; returns the loss."""
        total = sum(len(inputs) for inputs, _ in batches)
        before = [parameter.grad for parameter in self.model.parameters()]
        losses: list[Tensor] = []
        sums: list[list[Tensor | None]] = []
        for rank, (inputs, targets) in enumerate(batches):
            for parameter, old in zip(self.model.parameters(), before, strict=True):
                # Gradients that are there count once, in the first process.
                parameter.grad = None if old is None or rank > 0 else old.clone()
            losses.append(inputs.new_zeros(()))
            for x, y in zip(self._cut(inputs), self._cut(targets), strict=True):
                loss = self.loss_fn(self.model(x), y)
                weight = len(x) / total if self.reduction == "mean" else 1.0
                loss.backward(torch.full_like(loss, weight))
                losses[rank] += loss.detach() * weight
            sums.append([parameter.grad for parameter in self.model.parameters()])
        for parameter, of_ranks in zip(
            self.model.parameters(), zip(*sums, strict=True), strict=True
        ):
            parameter.grad = None
            for one in of_ranks:
                if one is not None:
                    parameter.grad = one if parameter.grad is None else parameter.grad + one
        return sum(losses[1:], losses[0])

    def _cut(self, tensor: Tensor) -> list[Tensor]:
        parts = torch.tensor_split(tensor, self.num_microbatches)
        return [part for part in parts if len(part)]


def train(
    step: Callable[[int], Any], optimizer: Optimizer, num_steps: int, every: int = 1
) -> list[Any]:
    """The losses of as many steps, with an update after each `every` of them."""
    losses = []
    for number in range(num_steps):
        losses.append(step(number))
        if (number + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def expected(
    rows: Sequence[int],
    num_microbatches: int,
    optimizer: Callable[[Any], Optimizer],
    **options: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses and parameters after ten steps, where process r has `rows[r]` rows in each."""
    model = nn.Sequential(*copy.deepcopy(layers()))
    every = options.pop("every", 1)
    reference = Reference(model, num_microbatches, nn.functional.mse_loss, **options)

    def step(number: int) -> Tensor:
        return reference.step([batch_of(number, rank, n) for rank, n in enumerate(rows)])

    losses = train(step, optimizer(model.parameters()), 10, every)
    return losses, {name: value.detach() for name, value in model.named_parameters()}
