"""The oracle: the plain model run microbatch by microbatch, without any of pykern's runtime."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pykern.runtime.random import action_seed


def rows_of(batch: int, num_microbatches: int) -> list[int]:
    """Rows of the microbatches that have any, larger ones first."""
    rows = [len(range(i, batch, num_microbatches)) for i in range(num_microbatches)]
    return [n for n in rows if n]


def plain_step(
    layers: nn.Sequential,
    inputs: Tensor,
    target: Tensor,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    num_microbatches: int,
    stages: Sequence[range] = (),
) -> Tensor:
    """Loss of the batch; gradients are added to `.grad`.

    With `stages`, the random numbers are those that the pipeline documents: each stage of each
    microbatch starts from its own seed.
    """
    before = torch.get_rng_state()
    step_seed = int(torch.empty((), dtype=torch.int64).random_())
    rows = rows_of(len(inputs), num_microbatches)
    total: Tensor | None = None
    for index, (x, y) in enumerate(zip(inputs.split(rows), target.split(rows), strict=True)):
        value: object = x
        for number, stage in enumerate(stages or [range(len(layers))]):
            torch.manual_seed(action_seed(step_seed, number, index))
            for layer in stage:
                value = layers[layer](value)
        loss = loss_fn(value, y)  # type: ignore[arg-type]
        weighted = loss * (len(x) / len(inputs))
        weighted.backward()
        total = weighted.detach() if total is None else total + weighted.detach()
    torch.set_rng_state(before)
    assert total is not None
    return total


def assert_same_state(pipe: nn.Module, plain: nn.Module) -> None:
    """Parameters, gradients and buffers agree by name and bit for bit."""
    theirs = dict(plain.named_parameters())
    ours = dict(pipe.named_parameters())
    assert list(ours) == list(theirs)
    for name, parameter in ours.items():
        expected = theirs[name].grad
        if expected is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert torch.equal(parameter.grad, expected), name
    buffers = dict(plain.named_buffers())
    for name, buffer in pipe.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
