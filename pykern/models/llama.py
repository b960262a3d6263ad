"""A Llama-style language model as a chain of layers fine enough for many stages.

The module holds no training code and does not depend on stages or devices.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.activation_linear import gated_linear
from ..kernels.rope import rope
from ..modes import same_numbers
from ..plan import require_counts, require_flags
from ..plan.counts import require_numbers
from .blocks import Head, check_heads, check_seed, initialise, normed_linear

EPS = 1e-5


class RotaryAttention(nn.Module):
    """The first half of a block, x + attention(norm(x)), causal: [batch, seq, width], same out."""

    def __init__(self, width: int, heads: int, kv_heads: int, base: float) -> None:
        """Make the layer; `kv_heads` divides `heads`, and `heads` divides `width`."""
        super().__init__()
        self.heads, self.kv_heads, self.base = heads, kv_heads, base
        self.norm = nn.RMSNorm(width, eps=EPS)
        packed = (heads + 2 * kv_heads) * (width // heads)
        self.qkv = nn.Linear(width, packed, bias=False)
        self.project = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Let every position attend to itself and to the positions before it."""
        x, qkv = normed_linear(self.norm, self.qkv, x)
        query, key, value = rope(qkv, self.heads, self.kv_heads, base=self.base)
        # enable_gqa: keys and values are not repeated for the queries that share them.
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        return x + self.project(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """The second half of a block, x + mlp(norm(x)): [batch, seq, width], same out."""

    def __init__(self, width: int, hidden: int) -> None:
        """Make the layer, `hidden` wide inside; gate and up are one linear layer, gate first."""
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=EPS)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.project = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the two linear layers with SwiGLU between to every position."""
        x, gate_up = normed_linear(self.norm, self.gate_up, x)
        return x + gated_linear(gate_up, self.project.weight)


def llama(  # noqa: PLR0913, PLR0917
    vocab: int = 256,
    layers: int = 4,
    width: int = 256,
    heads: int = 8,
    kv_heads: int = 2,
    hidden: int = 896,
    base: float = 10000.0,
    seed: int = 0,
    *,
    fused_loss: bool = False,
) -> nn.Sequential:
    """A Llama as a chain of 2 * layers + 2 modules: embedding, attention and MLP in turn, head.

    Blocks have RMSNorm before each half, rotary positions, keys and values shared by groups of
    queries, SwiGLU, and no biases. The proportions of Llama 3 8B are hidden = 3.5 * width and
    kv_heads = heads / 4.

    Args:
        vocab: Number of tokens; 256 for bytes.
        layers: Number of transformer blocks.
        width: Width of the residual stream; a multiple of 2 * `heads`.
        heads: Attention heads per block; a multiple of `kv_heads`.
        kv_heads: Heads of keys and values per block.
        hidden: Width within the MLP.
        base: Base of the wavelengths of positions, above 1; 500000 in Llama 3.
        seed: Seed of the initial weights. Torch's global random numbers are left alone.
        fused_loss: As for `gpt`.

    Returns:
        The model, from int64 ids [batch, seq] to float32 logits [batch, seq, vocab].

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If a size is below 1, one does not divide another that it must, or `base` is
            outside.

    Paper: H. Touvron et al., "LLaMA", 2023, arXiv 2302.13971, section 2.2; shared keys and values:
        J. Ainslie et al., "GQA", EMNLP 2023, arXiv 2305.13245.
    """
    require_counts(vocab=vocab, layers=layers, width=width)
    require_counts(heads=heads, kv_heads=kv_heads, hidden=hidden)
    require_flags(fused_loss=fused_loss)
    check_attention(width, heads, kv_heads, base)
    check_seed(seed)
    with same_numbers():
        torch.manual_seed(seed)
        halves: list[nn.Module] = []
        for _ in range(layers):
            halves += [RotaryAttention(width, heads, kv_heads, base), GatedMLP(width, hidden)]
        head = Head(vocab, nn.RMSNorm(width, eps=EPS), fused_loss=fused_loss)
        model = nn.Sequential(nn.Embedding(vocab, width), *halves, head)
        initialise(model, layers)
    return model


def check_attention(width: int, heads: int, kv_heads: int, base: float) -> None:
    """Raises TypeError or ValueError if rotary attention cannot have these sizes."""
    require_numbers(base=base)
    check_heads(width, heads)
    if width // heads % 2:
        raise ValueError(f"width / heads must be even, got {width // heads}")
    if heads % kv_heads:
        raise ValueError(f"kv_heads must divide heads, {heads}, got {kv_heads}")
    if not 1 < base < math.inf:
        raise ValueError(f"base must be above 1 and finite, got {base}")
