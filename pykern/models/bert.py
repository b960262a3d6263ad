"""A BERT-style encoder: every position looks at all positions that are not padding.

Norms stand before the halves, not behind them as in the first BERT: larger ones train only so (M.
Shoeybi et al., "Megatron-LM", 2019, arXiv 1909.08053, section 5.3), and a half then keeps its input
once, not that and its norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..modes import same_numbers
from ..plan import require_counts, require_flags
from .blocks import First, Head, OnFirst, OnPair, check_heads, check_rate, check_seed, initialise
from .gpt import MLP, Attention, Embedding


class MaskedEmbedding(nn.Module):
    """Embedding and mask: [batch, seq] int64 -> ([batch, seq, width], bool [batch, seq])."""

    def __init__(self, layer: Embedding, padding: int) -> None:
        """Take the embedding, and the token that fills short sequences up."""
        super().__init__()
        self.layer = layer
        self.padding = padding

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Embed `ids`, and tell which are not padding."""
        return self.layer(ids), ids != self.padding


class MaskedAttention(OnPair):
    """The first half of a block: (x, mask) in, the same out."""

    def forward(self, masked: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Let every position look at all that are not padding."""
        x, mask = masked
        return self.layer(x, mask[:, None, None, :]), mask


def bert(  # noqa: PLR0913, PLR0917
    vocab: int = 256,
    layers: int = 4,
    width: int = 256,
    heads: int = 8,
    context: int = 128,
    dropout: float = 0.0,
    padding: int = 0,
    seed: int = 0,
    *,
    fused_loss: bool = False,
) -> nn.Sequential:
    """An encoder as a chain of 2 * layers + 2 modules: embedding, attention and MLP in turn, head.

    Between the layers passes a pair: x [batch, seq, width], and a mask, bool [batch, seq], True
    where a token is not padding, which every attention needs and which costs a byte per token.

    Args:
        vocab: Number of tokens.
        layers: Number of blocks.
        width: Width of the residual stream; a multiple of `heads`.
        heads: Attention heads per block.
        context: Longest sequence, in tokens.
        dropout: Probability of dropping an activation in training, 0 <= dropout < 1.
        padding: The token that fills short sequences up, 0 <= padding < vocab. Every sequence has
            at least one other token.
        seed: Seed of the initial weights. Torch's global random numbers are left alone.
        fused_loss: As of `gpt`.

    Returns:
        The model, from int64 ids [batch, seq] to logits [batch, seq, vocab]; those of padding mean
        nothing, and the loss is to ignore them, as targets of -100.

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If a size is below 1, `heads` does not divide `width`, or `dropout` or `padding`
            is outside.

    Paper: J. Devlin et al., "BERT", NAACL 2019, arXiv 1810.04805, section 3.
    """
    require_counts(vocab=vocab, layers=layers, width=width, heads=heads, context=context)
    require_flags(fused_loss=fused_loss)
    check_heads(width, heads)
    check_rate(dropout)
    check_seed(seed)
    if isinstance(padding, bool) or not isinstance(padding, int):
        raise TypeError(f"padding must be an int, got {padding!r}")
    if not 0 <= padding < vocab:
        raise ValueError(f"padding must be a token, 0 <= padding < {vocab}, got {padding}")
    with same_numbers():
        torch.manual_seed(seed)
        embedding = Embedding(vocab, width, context, dropout)
        halves: list[nn.Module] = []
        for _ in range(layers):
            halves.append(MaskedAttention(Attention(width, heads, dropout)))
            halves.append(OnFirst(MLP(width, dropout)))
        head = First(Head(vocab, nn.LayerNorm(width), fused_loss=fused_loss))
        model = nn.Sequential(MaskedEmbedding(embedding, padding), *halves, head)
        initialise(model, layers)
    return model
