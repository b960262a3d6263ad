"""A byte-level GPT as a chain of layers fine enough for many stages.

It holds no training code and knows nothing of stages or devices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.activation_linear import gelu_linear
from ..kernels.dropout import dropout as drop
from ..modes import same_numbers
from ..plan import require_counts, require_flags
from .blocks import Head, check_heads, check_rate, check_seed, initialise, normed_linear


class Embedding(nn.Module):
    """Token and learned position embedding: [batch, seq] int64 -> [batch, seq, width]."""

    def __init__(self, vocab: int, width: int, context: int, dropout: float) -> None:
        """Make the two tables, for sequences of at most `context` tokens."""
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        """Embed `ids`, whose rows must not be longer than the context."""
        length, context = ids.shape[1], self.positions.num_embeddings
        if length > context:
            raise ValueError(
                f"a sequence must have at most {context} tokens, the model's context, got {length}"
            )
        hidden = self.tokens(ids) + self.positions.weight[:length]
        return drop(hidden, self.dropout, self.training)


class Attention(nn.Module):
    """The first half of a block, x + attention(norm(x)): [batch, seq, width], same out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """Make the layer; `heads` divides `width`."""
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Let every position look at itself and at those before it, or at those of the mask.

        Args:
            x: [batch, seq, width].
            mask: bool, to be broadcast to [batch, heads, seq, seq]: True where a position is seen.
        """
        batch, length, width = x.shape
        x, packed = normed_linear(self.norm, self.qkv, x)
        qkv = packed.view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, seq, width / heads]
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=rate, is_causal=mask is None
        )
        joined = mixed.transpose(1, 2).reshape(batch, length, width)
        return x + drop(self.project(joined), self.dropout, self.training)


class MLP(nn.Module):
    """The second half of a block, x + mlp(norm(x)): [batch, seq, width], same out."""

    def __init__(self, width: int, dropout: float) -> None:
        """Make the layer, four times as wide inside."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Apply the two linear layers with GELU between to every position."""
        x, hidden = normed_linear(self.norm, self.expand, x)
        y = gelu_linear(hidden, None, self.project.weight, self.project.bias)
        return x + drop(y, self.dropout, self.training)


def gpt(  # noqa: PLR0913, PLR0917
    vocab: int = 256,
    layers: int = 4,
    width: int = 256,
    heads: int = 8,
    context: int = 128,
    dropout: float = 0.0,
    seed: int = 0,
    *,
    tied: bool = False,
    fused_loss: bool = False,
) -> nn.Sequential:
    """A GPT as a chain of 2 * layers + 2 modules: embedding, attention and MLP in turn, head.

    The halves of a block are modules of their own, so that a stage can be half a block. Blocks are
    of LayerNorm before each half, GELU, and biases.

    Args:
        vocab: Number of tokens; 256 for bytes.
        layers: Number of transformer blocks.
        width: Width of the residual stream; a multiple of `heads`.
        heads: Attention heads per block.
        context: Longest sequence, in tokens.
        dropout: Probability of dropping an activation in training, 0 <= dropout < 1.
        seed: Seed of the initial weights. Torch's global random numbers are left alone.
        tied: The output layer's weight is that of the token embedding.
        fused_loss: While training the model returns `LazyLogits`, what logits are made of, for the
            loss that never holds all of them: `pykern.kernels.head_loss.LinearCrossEntropy`.

    Returns:
        The model, from int64 ids [batch, seq] to float32 logits [batch, seq, vocab].

    Raises:
        TypeError: If an argument is of another type.
        ValueError: If a size is below 1, `heads` does not divide `width`, or `dropout` is outside.

    Paper: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2);
        initialisation from section 2.3.
    """
    require_counts(vocab=vocab, layers=layers, width=width, heads=heads, context=context)
    require_flags(tied=tied, fused_loss=fused_loss)
    check_heads(width, heads)
    check_rate(dropout)
    check_seed(seed)
    with same_numbers():
        torch.manual_seed(seed)
        embedding = Embedding(vocab, width, context, dropout)
        halves: list[nn.Module] = []
        for _ in range(layers):
            halves += [Attention(width, heads, dropout), MLP(width, dropout)]
        head = Head(vocab, nn.LayerNorm(width), fused_loss=fused_loss)
        if tied:
            head.logits.weight = embedding.tokens.weight
        model = nn.Sequential(embedding, *halves, head)
        initialise(model, layers)
    return model


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all positions, in nats per token.

    Args:
        logits: [batch, seq, vocab], float.
        target: [batch, seq], int64: the token that follows each position.

    Returns:
        A scalar of the type of `logits`.
    """
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
