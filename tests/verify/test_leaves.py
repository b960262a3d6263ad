"""Gradients of tensors that are not parameters: once from a step, and none from measurements."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pykern

WIDTH = 4


class Scaled(nn.Module):
    """Has a tensor that trains in an attribute, and one among its buffers."""

    buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.attribute = torch.ones(WIDTH, requires_grad=True)
        self.register_buffer("buffer", torch.ones(WIDTH, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.attribute * self.buffer


class Leaves:
    """A pipeline, a batch, and the tensors that train beside parameters."""

    def __init__(self, pipe: pykern.Pipeline, scaled: Scaled, scale: Tensor) -> None:
        self.pipe = pipe
        self.x = torch.ones(8, WIDTH, requires_grad=True)
        self.target = torch.zeros(8, WIDTH, requires_grad=True)
        self.held = [self.x, self.target, scaled.attribute, scaled.buffer]
        # Named by the loss alone.
        self.scale = scale

    def gradients(self) -> Sequence[Tensor | None]:
        tensors = [*self.held, self.scale]
        return [None if one.grad is None else one.grad.clone() for one in tensors]

    def step(self) -> Tensor:
        return self.pipe.step(self.x, target=self.target)


@contextmanager
def pipeline(
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss, **more: Any
) -> Iterator[Leaves]:
    torch.manual_seed(0)
    scaled, scale = Scaled(), torch.ones(WIDTH, requires_grad=True)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), scaled, nn.Linear(WIDTH, WIDTH))
    with pykern.Pipeline(
        model,
        devices="cpu:2",
        microbatches=2,
        loss_fn=lambda output, target: loss(output * scale, target),
        **more,
    ) as pipe:
        yield Leaves(pipe, scaled, scale)


def same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def test_a_verified_step_adds_once() -> None:
    with pipeline() as plain, pipeline(verify=1) as verified:
        for _ in range(2):
            plain.step()
            verified.step()
            assert same(verified.gradients(), plain.gradients())
            assert None not in plain.gradients()


def test_a_difference_leaves_the_gradients_of_the_step() -> None:
    class Moves(nn.Module):
        """Gives every call another loss, which no comparison finds equal."""

        calls = 0

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            Moves.calls += 1
            return F.mse_loss(output, target) + float(Moves.calls)

    with pipeline() as plain, pipeline(Moves(), verify=1) as verified:
        plain.step()
        with pytest.raises(pykern.VerifyError):
            verified.step()
        assert same(verified.gradients(), plain.gradients())


@pytest.mark.filterwarnings("ignore:the times of layers differ")
@pytest.mark.parametrize("steps", [0, 1])
def test_a_profile_leaves_gradients_alone(steps: int) -> None:
    with pipeline() as leaves:
        for _ in range(steps):
            leaves.step()
        before = leaves.gradients()[: len(leaves.held)]
        held = [one.grad for one in leaves.held]
        leaves.pipe.profile(leaves.x, target=leaves.target, steps=1)
        assert same(leaves.gradients()[: len(leaves.held)], before)
        assert all(one.grad is grad for one, grad in zip(leaves.held, held, strict=True))
