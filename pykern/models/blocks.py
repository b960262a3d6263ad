"""Parts that the models share: a norm fused with a linear layer, a head, initial values.

Every half of a block is x + f(norm(x)), a layer of its own, and hands over one tensor [batch, seq,
width]: the finished sum. The next half keeps only this tensor of its input, as its residual and its
norm's input at once, and only this tensor crosses from stage to stage. To hand over x and
f(norm(x)) apart, for the next half's norm to add up, would keep as much and send twice as much.

Norms and linear layers hold parameters here, which the fused operations of `pykern.kernels` read.
Most of these modules are not called, so hooks on them do not run.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from ..kernels.head_loss import LazyLogits
from ..kernels.norm import NormKind, layer_norm, rms_norm
from ..kernels.norm_linear import norm_linear
from ..plan.counts import require_numbers

Norm = nn.LayerNorm | nn.RMSNorm


def normed_linear(norm: Norm, linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor]:
    """`x`, for use as the residual, and linear(norm(x)); norm(x) is not kept."""
    kind: NormKind = "rms" if isinstance(norm, nn.RMSNorm) else "layer"
    return norm_linear(
        x,
        None,
        norm.weight,
        getattr(norm, "bias", None),
        linear.weight,
        linear.bias,
        kind=kind,
        eps=cast("float", norm.eps),
    )


def normed(norm: Norm, x: Tensor) -> Tensor:
    """norm(x) by the fused operations."""
    if isinstance(norm, nn.RMSNorm):
        return rms_norm(x, norm.weight, cast("float", norm.eps))
    return layer_norm(x, norm.weight, norm.bias, norm.eps)


class Head(nn.Module):
    """Final norm and output layer: [batch, seq, width] -> logits [batch, seq, vocab].

    With `fused_loss`, in a training step with gradients, the head leaves the product to a loss that
    never holds all logits: `pykern.kernels.head_loss.LinearCrossEntropy`.
    """

    def __init__(self, vocab: int, norm: Norm, *, fused_loss: bool) -> None:
        """Make the layer; the norm tells the width."""
        super().__init__()
        self.norm = norm
        self.logits = nn.Linear(norm.normalized_shape[0], vocab, bias=False)
        self.fused_loss = fused_loss

    def forward(self, x: Tensor) -> Tensor | LazyLogits:
        """Score every token of the vocabulary at every position."""
        if self.fused_loss and self.training and torch.is_grad_enabled():
            return LazyLogits(normed(self.norm, x), self.logits.weight)
        return normed_linear(self.norm, self.logits, x)[1]


class OnPair(nn.Module):
    """Holds a layer for the first tensor of a pair."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class OnFirst(OnPair):
    """A layer on the first tensor of a pair; the second tensor passes unchanged."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Apply the layer to the first."""
        x, other = pair
        return self.layer(x), other


class First(OnPair):
    """A layer on the first tensor of a pair; the second tensor is dropped."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor | LazyLogits:
        """Apply the layer to the first."""
        return self.layer(pair[0])  # type: ignore[no-any-return]


def check_heads(width: int, heads: int) -> None:
    """Raises ValueError if the number of heads does not divide the width."""
    if width % heads:
        raise ValueError(f"heads must divide width, {width}, got {heads}")


def check_rate(dropout: float) -> None:
    """Raises TypeError or ValueError if the rate of dropout is not a number in its range."""
    require_numbers(dropout=dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")


def check_seed(seed: int) -> None:
    """Raises TypeError or ValueError if torch cannot be seeded so."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed must be -2**63 to 2**64 - 1, got {seed}")


def initialise(model: nn.Module, layers: int) -> None:
    """Initialise as GPT-2: normal, deviation 0.02, narrower if 2 * layers projections add up."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" not in name:
            narrower = math.sqrt(2 * layers) if "project" in name else 1.0
            nn.init.normal_(parameter, std=0.02 / narrower)
