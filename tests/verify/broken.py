"""Layers that compute something else in a pipeline than in the plain model."""

import random
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8


def elsewhere() -> bool:
    """Whether this is a worker's thread."""
    return threading.current_thread() is not threading.main_thread()


class _Backward(torch.autograd.Function):
    """The gradient as it is, and something said to the layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.layer.in_backward(gradient), None


class WrongForward(nn.Linear):
    """One value of its output is another on a worker."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).clone()
        y[0, 3] += 0.5 * elsewhere()
        return y


class WrongInputGradient(nn.Linear):
    """The gradient that it gives the layer before is another on a worker."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_Backward.apply(x, self))

    def in_backward(self, gradient: Tensor) -> Tensor:
        return gradient * 2 if elsewhere() else gradient


class WrongWeightGradient(nn.Linear):
    """Its bias gets another gradient on a worker, and nothing else does."""

    def forward(self, x: Tensor) -> Tensor:
        bias = _Backward.apply(self.bias, self)
        return nn.functional.linear(x, self.weight, bias)

    def in_backward(self, gradient: Tensor) -> Tensor:
        return gradient + 1 if elsewhere() else gradient


class NoWeightGradient(nn.Linear):
    """Its bias gets no gradient on a worker."""

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.detach() if elsewhere() else self.bias
        return nn.functional.linear(x, self.weight, bias)


class WritesBufferInBackward(nn.Linear):
    """Multiplies by a buffer that backward changes, so that the order of F and B counts."""

    scale: Tensor

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale.clone()
        return _Backward.apply(y, self)

    def in_backward(self, gradient: Tensor) -> Tensor:
        self.scale.add_(0.5)
        return gradient


class WrongBuffer(nn.Linear):
    """Counts in a buffer, which nothing reads, and by two on a worker."""

    count: Tensor

    def __init__(self, width: int, out: int) -> None:
        super().__init__(width, out)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(2 if elsewhere() else 1)
        return super().forward(x)


class CountsElsewhere(nn.Linear):
    """Depends on how often any such layer has been called, which stands in no layer."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsElsewhere.calls += 1
        return super().forward(x) * (1 + CountsElsewhere.calls)


class ReadsTheClock(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + time.perf_counter_ns() % 1_000_003


class DrawsFromPython(nn.Linear):
    """Draws from one generator for all layers, so that the order of layers counts."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class ForgetsOnce(nn.Linear):
    """Is wrong the first time that a worker calls it, and never again."""

    told = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if elsewhere() and not type(self).told:
            type(self).told = True
            return y + 1
        return y


class RaisesHere(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if not elsewhere():
            raise LookupError("not on a worker")
        return super().forward(x)
