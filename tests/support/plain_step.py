"""The oracle: the plain model run microbatch by microbatch, without any of pykern's runtime."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pykern.runtime.random.seed import action_seed

# Sets torch's random numbers to those of a stage.
Seed = Callable[[int], object]


def rows_of(batch: int, num_microbatches: int) -> list[int]:
    """Rows of the microbatches that have any, larger ones first."""
    rows = [len(range(i, batch, num_microbatches)) for i in range(num_microbatches)]
    return [n for n in rows if n]


def plain_step(  # noqa: PLR0913 - what a step is made of
    layers: nn.Sequential,
    inputs: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    num_microbatches: int,
    stages: Sequence[range] = (),
    *,
    num_replicas: int = 1,
) -> Tensor:
    """Loss of the batch; gradients are added to `.grad`.

    With `stages`, the random numbers are those that the pipeline documents: each stage of each
    microbatch starts from its own seed. With replicas, the sum of each but the first is added when
    it is complete.
    """
    rows = rows_of(len(inputs), num_microbatches)
    parts = list(zip(inputs.split(rows), target.split(rows), strict=True))

    def loss_of(index: int, seed: Seed) -> Tensor:
        x, y = parts[index]
        value: object = x
        for number, stage in enumerate(stages or [range(len(layers))]):
            seed(number)
            for layer in stage:
                value = layers[layer](value)
        return loss_fn(value, y)  # type: ignore[arg-type]

    return by_microbatch(layers, rows, loss_of, num_replicas)


def by_microbatch(
    model: nn.Module,
    rows: Sequence[int],
    loss_of: Callable[[int, Seed], Tensor],
    num_replicas: int = 1,
) -> Tensor:
    """Loss of the batch from the loss of each microbatch; gradients are added to `.grad`.

    Args:
        model: what trains.
        rows: of each microbatch, by which its loss counts.
        loss_of: gives the loss of a microbatch. It calls the function that it is given at the
            beginning of each stage, with the stage's number.
        num_replicas: which take turns with the microbatches.
    """
    before = torch.get_rng_state()
    step_seed = int(torch.empty((), dtype=torch.int64).random_())

    def run(index: int) -> Tensor:
        loss = loss_of(index, lambda stage: torch.manual_seed(action_seed(step_seed, stage, index)))
        weighted = loss * (rows[index] / sum(rows))
        weighted.backward()
        return weighted.detach()

    losses = {index: run(index) for index in range(0, len(rows), num_replicas)}
    for replica in range(1, num_replicas):
        collected = [(parameter, parameter.grad) for parameter in model.parameters()]
        for parameter, _ in collected:
            parameter.grad = None
        losses |= {index: run(index) for index in range(replica, len(rows), num_replicas)}
        for parameter, first in collected:
            terms = [term for term in (first, parameter.grad) if term is not None]
            parameter.grad = sum(terms[1:], terms[0]) if terms else None
    torch.set_rng_state(before)
    return sum((losses[index] for index in range(1, len(rows))), losses[0])
