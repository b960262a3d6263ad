"""Layers of many kinds, run whole and in two parts."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from pykern.kernels.handover import TwoParts, Weights
from pykern.models.gpt import gpt
from pykern.runtime.autograd.split import Work, backward_to_inputs
from pykern.torch_private import NODES_LAST
from tests.runtime.models import Rows
from tests.support.comparison import assert_same_gradients

WIDTH = 8


class Make(nn.Module):
    """A layer from a function of some parameters and x."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(shape) for shape in shapes)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(*self.weights, x)


class Product(torch.autograd.Function):
    """x * w, which computes both gradients at once, and counts its backwards."""

    num_backwards = 0

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, x)
        return w * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        Product.num_backwards += 1
        w, x = ctx.saved_tensors
        return (gradients[0] * x).sum(0), gradients[0] * w


class Affine(TwoParts):
    """x @ w + b, or x @ w, which hands its weights over."""

    weights = (1, 3)

    @staticmethod
    def compute(ctx: Any, scale: float, w: Tensor, x: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(w, x)
        ctx.scale, ctx.has_bias = scale, b is not None
        product = x @ w * scale
        return product if b is None else product + b

    @staticmethod
    def gradients(ctx: Any, *gradients: Tensor) -> tuple[list[Tensor | None], Weights]:
        w, x = ctx.saved_tensors
        (gradient,), scale, has_bias = gradients, ctx.scale, ctx.has_bias

        def weights() -> dict[int, Tensor]:
            of_weight = {1: x.T @ gradient * scale}
            return of_weight | {3: gradient.sum(0)} if has_bias else of_weight

        return [None, None, gradient @ w.T * scale, None], weights


def affine(w: Tensor, b: Tensor, x: Tensor) -> Any:
    y = Affine.apply(0.7, w, x, b)
    return Affine.apply(1.0, w, torch.tanh(y), None)


def weight_on_the_way(b: Tensor, x: Tensor) -> Any:
    return Affine.apply(1.0, x.T @ x, x, b)


def scaled(row: Tensor, w: Tensor, x: Tensor) -> Any:
    return Affine.apply(1.0, Product.apply(row, w), x, None)


def embedded(table: Tensor, x: Tensor) -> Tensor:
    return x + F.embedding(torch.arange(len(x)) % 3, table)


def written(row: Tensor, x: Tensor) -> Tensor:
    y = x * 2
    y[1] = row
    y[:, 2].mul_(row[0])
    return y.sin()


def reused(w: Tensor, x: Tensor) -> Tensor:
    """A sum in w of two gradients from the side and two from x's way, in turns."""
    y = x @ w
    side = w.sin() + w
    return torch.tanh(y) @ side * w[0]


def autocast(w: Tensor, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (torch.tanh(x @ w) @ w).float()


LINEAR = (WIDTH, WIDTH)
ROW = (WIDTH,)
# The layers, and whether something is left for W when they are split.
LAYERS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "linear": (lambda: nn.Linear(*LINEAR), True),
    "no parameters": (nn.Tanh, False),
    "identity": (nn.Identity, False),
    "gpt": (lambda: nn.Sequential(*list(gpt(16, 2, WIDTH, 2, 9))[1:-1], nn.Flatten()), True),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.BatchNorm1d(WIDTH)), True),
    "lstm": (lambda: Rows(WIDTH, WIDTH), True),
    "frozen": (lambda: nn.Sequential(nn.Linear(*LINEAR).requires_grad_(False)), False),
    "broadcast": (lambda: Make(lambda a, b, x: x * a + b, (1, 1), ()), True),
    "same edge twice": (lambda: Make(lambda w, x: torch.addcmul(x, w, w), ROW), True),
    "three times": (lambda: Make(lambda w, x: ((x @ w).sin() @ w).cos() @ w, LINEAR), True),
    "scaled": (lambda: Make(lambda w, s, x: x @ (w * s), LINEAR, ROW), True),
    "weight norm": (lambda: weight_norm(nn.Linear(*LINEAR)), True),
    "embedding": (lambda: Make(embedded, (3, WIDTH)), True),
    "in place": (lambda: Make(written, ROW), True),
    "double": (lambda: Make(lambda w, x: (x.double() @ w.double()).float(), LINEAR), True),
    "autocast": (lambda: Make(autocast, LINEAR), True),
    "output aside": (lambda: Make(lambda w, x: (x @ w, w.sin()), LINEAR), True),
    "outputs aside only": (lambda: Make(lambda w, _: (w.sin(), w), LINEAR), True),
    "sum in turns": (lambda: Make(reused, LINEAR), False),
    "of two parts": (lambda: Make(affine, LINEAR, ROW), True),
    "of two parts, weight on the way": (lambda: Make(weight_on_the_way, ROW), False),
    "of two parts, weight by the user's": (lambda: Make(scaled, ROW, LINEAR), NODES_LAST),
    "function of the user's": (lambda: Make(Product.apply, ROW), False),
}


def tensors(output: Any) -> list[Tensor]:
    return list(output) if isinstance(output, tuple) else [output]


def no_work() -> None:
    raise AssertionError("there is no earlier microbatch")


def split(
    layer: nn.Module, x: Tensor, finish_earlier: Work = no_work
) -> tuple[Tensor, Work | None]:
    """Forward and I; the leaf and what is left."""
    leaf = x.clone().requires_grad_()
    outputs = tensors(layer(leaf))
    gradients = [torch.ones_like(output) * 0.37 for output in outputs]
    return leaf, backward_to_inputs(outputs, gradients, [leaf], finish_earlier)


def whole(layer: nn.Module, x: Tensor) -> Tensor:
    """Forward and B; the leaf."""
    leaf = x.clone().requires_grad_()
    outputs = tensors(layer(leaf))
    torch.autograd.backward(outputs, [torch.ones_like(output) * 0.37 for output in outputs])
    return leaf


def assert_parts_are_whole(ours: nn.Module, theirs: nn.Module, x: Tensor) -> None:
    """I and W of one layer give what B of its twin gives."""
    leaf, work = split(ours, x)
    assert work is not None
    assert all(parameter.grad is None for parameter in ours.parameters())
    work()
    other = whole(theirs, x)
    assert leaf.grad is not None
    assert other.grad is not None
    assert torch.equal(leaf.grad, other.grad)
    assert_same_gradients(ours, theirs)


def data(name: str) -> Tensor:
    return torch.randn(5, 9, WIDTH) if name == "gpt" else torch.randn(5, WIDTH)
