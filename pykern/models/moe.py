"""A Llama-style language model whose MLPs are experts, of which each token visits a few.

The module holds no training code and does not depend on stages or devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.experts import experts
from ..kernels.head_loss import LazyLogits
from ..kernels.routing import balance_loss, route
from ..modes import same_numbers
from ..plan import require_counts, require_flags
from ..plan.counts import require_numbers
from .blocks import Head, OnFirst, OnPair, check_seed, initialise, normed
from .llama import EPS, RotaryAttention, check_attention

# The input and output of layers: x [batch, seq, width], and a scalar, the sum of balance losses.
Balanced = tuple[Tensor, Tensor]


class BalancedEmbedding(nn.Module):
    """Token embedding: [batch, seq] int64 -> ([batch, seq, width], a sum of 0)."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)

    def forward(self, ids: Tensor) -> Balanced:
        """Embed `ids`."""
        return self.tokens(ids), torch.zeros((), device=ids.device)


class Experts(nn.Module):
    """The second half of a block, x + experts(norm(x)): (x, sum) in, the same out."""

    def __init__(self, width: int, hidden: int, num_experts: int, num_chosen: int) -> None:
        """Make the layer: experts of `hidden` inside, of which a token visits `num_chosen`."""
        super().__init__()
        self.num_chosen = num_chosen
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.router = nn.Linear(width, num_experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden, width))
        self.project = nn.Parameter(torch.empty(num_experts, width, hidden))

    def forward(self, balanced: Balanced) -> Balanced:
        """Send every position to the experts that its router scores highest."""
        x, balance = balanced
        y = normed(self.norm, x)
        logits = self.router(y)
        routing = route(logits, self.num_chosen)
        total = balance + balance_loss(logits, routing)
        return x + experts(y, routing, self.gate_up, self.project), total


class BalancedHead(OnPair):
    """Final norm and output layer: (x, sum) -> logits, in training with the sum beside them."""

    def forward(self, balanced: Balanced) -> Tensor | tuple[Tensor | LazyLogits, Tensor]:
        """Score every token of the vocabulary at every position."""
        x, balance = balanced
        logits = self.layer(x)
        return (logits, balance) if self.training and torch.is_grad_enabled() else logits


def moe(  # noqa: PLR0913, PLR0917
    vocab: int = 256,
    layers: int = 4,
    width: int = 256,
    heads: int = 8,
    kv_heads: int = 2,
    hidden: int = 448,
    num_experts: int = 8,
    num_chosen: int = 2,
    base: float = 10000.0,
    seed: int = 0,
    *,
    fused_loss: bool = False,
) -> nn.Sequential:
    """A mixture of experts as a chain of 2 * layers + 2 modules.

    The modules are an embedding, attention and experts in turn, and a head; attention is that of
    `llama`. Layers pass on a pair: x [batch, seq, width], and the sum of the routers' balance
    losses, a scalar. Every stage adds to the sum, and the last stage uses it in the loss
    (`with_balance`).

    Args:
        vocab: Number of tokens; 256 for bytes.
        layers: Number of transformer blocks.
        width: Width of the residual stream; a multiple of 2 * `heads` and of 8.
        heads: Attention heads per block; a multiple of `kv_heads`.
        kv_heads: Heads of keys and values per block.
        hidden: Width within an expert; a multiple of 8.
        num_experts: Experts per block.
        num_chosen: Experts that a token visits, at most `num_experts`.
        base: As for `llama`.
        seed: Seed of the initial weights. Torch's global random numbers are left alone.
        fused_loss: As for `gpt`.

    Returns:
        The model, from int64 ids [batch, seq] to float32 logits [batch, seq, vocab]; while
        training, logits and the sum of balance losses.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If a size is below 1, or one does not divide or exceeds another that it must
            not.

    Paper: A. Jiang et al., "Mixtral of Experts", 2024, arXiv 2401.04088, section 2; balance: W.
        Fedus et al., "Switch Transformers", JMLR 2022, arXiv 2101.03961, section 2.2.
    """
    require_counts(vocab=vocab, layers=layers, width=width, heads=heads, kv_heads=kv_heads)
    require_counts(hidden=hidden, num_experts=num_experts, num_chosen=num_chosen)
    require_flags(fused_loss=fused_loss)
    check_attention(width, heads, kv_heads, base)
    check_seed(seed)
    for name, size in {"width": width, "hidden": hidden}.items():
        if size % 8:
            raise ValueError(f"{name} must be a multiple of 8, got {size}")
    if num_chosen > num_experts:
        raise ValueError(
            f"num_chosen must be at most {num_experts}, the number of experts, got {num_chosen}"
        )
    with same_numbers():
        torch.manual_seed(seed)
        halves: list[nn.Module] = []
        for _ in range(layers):
            halves.append(OnFirst(RotaryAttention(width, heads, kv_heads, base)))
            halves.append(Experts(width, hidden, num_experts, num_chosen))
        head = BalancedHead(Head(vocab, nn.RMSNorm(width, eps=EPS), fused_loss=fused_loss))
        model = nn.Sequential(BalancedEmbedding(vocab, width), *halves, head)
        initialise(model, layers)
    return model


def with_balance(
    loss_fn: Callable[[Any, Tensor], Tensor], coefficient: float = 0.01
) -> Callable[[tuple[Any, Tensor], Tensor], Tensor]:
    """A loss of the output of `moe` in training: a loss of the logits plus the balance losses.

    Args:
        loss_fn: Called with logits, or `LazyLogits`, and target.
        coefficient: Factor of the sum of balance losses; 0.01 in the paper.

    Raises:
        TypeError: If the loss is not callable, or the factor not a number.
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be callable, got {loss_fn!r}. Give a function of the logits")
    require_numbers(coefficient=coefficient)

    def loss(output: tuple[Any, Tensor], target: Tensor) -> Tensor:
        logits, balance = output
        return loss_fn(logits, target) + coefficient * balance

    return loss
