"""Dropout whose mask is a function of a seed: the backward recomputes it; no mask is stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import seeds
from .operation import define, wide
from .philox import random_words


def threshold(rate: float) -> int:
    """The smallest random word with which an element is kept.

    Raises:
        ValueError: the rate is not 0 <= rate < 1.
    """
    if not 0 <= rate < 1:
        raise ValueError(f"the rate of dropout must be at least 0 and below 1, got {rate}")
    # A rate near 1 would round to 2**32, which does not fit into 32 bits.
    return min(round(rate * 2**32), 2**32 - 1)


def masked(x: Tensor, rate: float, seed: int, place: Tensor | None) -> Tensor:
    """The operation in plain torch: kept elements are divided by 1 - rate in float32.

    Args:
        x: floating, of any shape.
        rate: 0 <= rate < 1.
        seed: as of `seeds.Seed`.
        place: as of `seeds.Seed`.

    Returns:
        As `x`, contiguous.
    """
    kept = keeps(x, rate, seed, place)
    return torch.where(kept, wide(x) * (1 / (1 - rate)), 0.0).to(x.dtype).contiguous()


def keeps(x: Tensor, rate: float, seed: int, place: Tensor | None) -> Tensor:
    """The mask of kept elements: bool, of the shape of `x`. Columns are the last dimension."""
    num_columns = x.shape[-1] if x.dim() else 1
    num_rows = x.numel() // num_columns if num_columns else 0
    words = random_words(seed if place is None else place, num_rows, num_columns, x.device)
    return (words >= threshold(rate)).view(x.shape)


def _like(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


_dropout = define("dropout(Tensor x, float rate, int seed, Tensor? place) -> Tensor", masked, _like)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, seed: seeds.Seed) -> Tensor:
        ctx.rate, ctx.seed = rate, seed.value
        ctx.save_for_backward(seed.place)
        return _dropout(x, rate, *seed)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        seed = seeds.Seed(ctx.seed, place)
        return _Dropout.apply(gradients[0], ctx.rate, seed), None, None  # type: ignore[no-untyped-call]


def dropout(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Sets elements to zero at random and divides the others by 1 - rate.

    Args:
        x: float32, bfloat16, float16 or float64, of any shape.
        rate: the probability of zero, 0 <= rate < 1, to 32 bits.
        training: False returns `x` unchanged.

    Returns:
        As `x`; the product is rounded once from float32.

    Raises:
        ValueError: the rate is not 0 <= rate < 1.
        TypeError: `x` is not floating.

    Paper: N. Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from
        Overfitting", JMLR 2014.
    """
    threshold(rate)
    if not x.is_floating_point():
        raise TypeError(f"x must be floating point, got {x.dtype}")
    if rate == 0 or not training:
        return x
    return _Dropout.apply(x, rate, seeds.draw())  # type: ignore[no-any-return,no-untyped-call]
