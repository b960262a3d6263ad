"""A byte-level GPT in plain torch, as a chain of layers fine enough for many stages.

It holds no training code and knows nothing of stages or devices.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """Token and learned position embedding: [batch, seq] int64 -> [batch, seq, width]."""

    def __init__(self, vocab: int, width: int, context: int, dropout: float) -> None:
        """Make the two tables, for sequences of at most `context` tokens."""
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor) -> Tensor:
        """Embed `ids`, whose rows must not be longer than the context."""
        length, context = ids.shape[1], self.positions.num_embeddings
        if length > context:
            raise ValueError(f"a sequence has {length} tokens; the model's context is {context}")
        hidden = self.tokens(ids) + self.positions.weight[:length]
        return self.dropout(hidden)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """The first half of a block, x + attention(norm(x)), causal: [batch, seq, width], same out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        """Make the layer; `heads` divides `width`."""
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Let every position look at itself and at those before it."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, seq, width / heads]
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        joined = mixed.transpose(1, 2).reshape(batch, length, width)
        return x + self.dropout(self.project(joined))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """The second half of a block, x + mlp(norm(x)): [batch, seq, width], same out."""

    def __init__(self, width: int, dropout: float) -> None:
        """Make the layer, four times as wide inside."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the two linear layers with GELU between to every position."""
        hidden = F.gelu(self.expand(self.norm(x)))
        return x + self.dropout(self.project(hidden))  # type: ignore[no-any-return]


class Head(nn.Module):
    """Final norm and untied output layer: [batch, seq, width] -> logits [batch, seq, vocab]."""

    def __init__(self, vocab: int, width: int) -> None:
        """Make the layer."""
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Score every token of the vocabulary at every position."""
        return self.logits(self.norm(x))  # type: ignore[no-any-return]


def gpt(  # noqa: PLR0913, PLR0917
    vocab: int = 256,
    layers: int = 4,
    width: int = 256,
    heads: int = 8,
    context: int = 128,
    dropout: float = 0.0,
    seed: int = 0,
) -> nn.Sequential:
    """A GPT as a chain of 2 * layers + 2 modules: embedding, attention and MLP in turn, head.

    The halves of a block are modules of their own, so that a stage can be half a block.

    Args:
        vocab: Number of tokens; 256 for bytes.
        layers: Number of transformer blocks.
        width: Width of the residual stream; a multiple of `heads`.
        heads: Attention heads per block.
        context: Longest sequence, in tokens.
        dropout: Probability of dropping an activation in training, 0 <= dropout < 1.
        seed: Seed of the initial weights. Torch's global random numbers are left alone.

    Returns:
        The model: int64 ids [batch, seq] -> float32 logits [batch, seq, vocab].

    Raises:
        ValueError: If a size is below 1, `heads` does not divide `width`, or `dropout` is outside.

    Paper: A. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019 (GPT-2);
        initialisation from section 2.3.
    """
    sizes = {"vocab": vocab, "layers": layers, "width": width, "heads": heads, "context": context}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it must be at least 1")
    if width % heads:
        raise ValueError(f"width is {width} and heads is {heads}; heads must divide width")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}; it must be at least 0 and below 1")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        halves: list[nn.Module] = []
        for _ in range(layers):
            halves += [Attention(width, heads, dropout), MLP(width, dropout)]
        model = nn.Sequential(
            Embedding(vocab, width, context, dropout), *halves, Head(vocab, width)
        )
        _initialise(model, layers)
    return model


def _initialise(model: nn.Sequential, layers: int) -> None:
    """GPT-2's: normal with deviation 0.02, narrower where 2 * layers projections add up."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" not in name:
            narrower = math.sqrt(2 * layers) if "project" in name else 1.0
            nn.init.normal_(parameter, std=0.02 / narrower)


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy over all positions, in nats per token.

    Args:
        logits: [batch, seq, vocab], float.
        target: [batch, seq], int64: the token that follows each position.

    Returns:
        A scalar of the type of `logits`.
    """
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())
