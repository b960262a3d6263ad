"""Transformers: parameters and buffers that the outer forward uses itself, and masks by name."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import ROWS, WIDTH, Case, mean_square, vectors

_VOCAB = 17
_LENGTH = 5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def _mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Block(nn.Module):
    """Normalises in front of what it adds, or behind it."""

    def __init__(self, *, pre: bool) -> None:
        super().__init__()
        self.pre = pre
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = _mlp()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.pre:
            x = x + self.attention(self.norm1(x), mask)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.mlp(x))


class Language(nn.Module):
    """Tokens in, logits out; a table of positions that the forward adds, and a causal mask."""

    causal: Tensor

    def __init__(self, *, pre: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.randn(_LENGTH + 2, WIDTH))
        self.register_buffer("causal", torch.ones(7, 7, dtype=torch.bool).tril(), persistent=False)
        self.blocks = nn.ModuleList(Block(pre=pre) for _ in range(3))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, _VOCAB, bias=False)

    def forward(self, ids: Tensor, keep: Tensor | None = None) -> Tensor:
        length = ids.shape[1]
        mask = self.causal[:length, :length]
        if keep is not None:
            mask = mask & keep[:, None, None, :]
        x = self.tokens(ids) + self.positions[:length]
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Tied(nn.Module):
    """The table of tokens is the head's as well; the positions are a table in the middle, too."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(_VOCAB, WIDTH), nn.Embedding(_LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(pre=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, _VOCAB, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        steps = torch.arange(ids.shape[1])
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x + self.positions(steps))
        return self.head(x)


class Vision(nn.Module):
    """Patches, with a token of the model's own in front."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, 5, WIDTH))
        self.blocks = nn.Sequential(*(Block(pre=True) for _ in range(3)))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = self.blocks(x + self.position)
        return self.head(x[:, 0] * self.scale)


class EncoderDecoder(nn.Module):
    """The decoder's layers all look at what the encoder has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(_VOCAB, WIDTH), nn.Embedding(_VOCAB, WIDTH)
        self.encoder = nn.ModuleList(Block(pre=True) for _ in range(2))
        self.crosses = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(3)
        )
        self.decoder = nn.ModuleList(Block(pre=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, _VOCAB)

    def forward(self, source: Tensor, target: Tensor, *, padding: Tensor) -> Tensor:
        memory = self.source(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self.target(target)
        for cross, layer in zip(self.crosses, self.decoder, strict=True):
            found, _ = cross(x, memory, memory, key_padding_mask=padding, need_weights=False)
            x = layer(x + found)
        return self.head(x)


class Pooling(nn.Module):
    """Learned queries look at the input, time and again."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, WIDTH))
        self.looks = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, batch_first=True) for _ in range(4)
        )
        self.mixes = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(3 * WIDTH, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        latents = self.queries.expand(len(x), -1, -1)
        looked_at = []
        for look, mix in zip(self.looks, self.mixes, strict=True):
            found, weights = look(latents, x, x)
            looked_at.append(weights)
            latents = latents + torch.tanh(mix(found))
        return self.head(latents.flatten(1)), looked_at


def _pooling_loss(output: tuple[Tensor, list[Tensor]], target: Tensor) -> Tensor:
    sharpness = sum((weights.square().mean() for weights in output[1]), torch.tensor(0.0))
    return F.mse_loss(output[0], target) - 0.1 * sharpness


def _token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def _ids() -> Tensor:
    return torch.randint(_VOCAB, (ROWS, _LENGTH))


def _language(*, pre: bool, padded: bool = False) -> Case:
    keep = torch.ones(ROWS, _LENGTH, dtype=torch.bool)
    keep[::2, -2:] = False
    named = {"keep": keep} if padded else {}
    return Case(Language(pre=pre), (_ids(),), _token_loss, _ids(), named)


def _encoder_decoder() -> Case:
    padding = torch.zeros(ROWS, _LENGTH, dtype=torch.bool)
    padding[1::3, -1:] = True
    named = {"padding": padding}
    return Case(EncoderDecoder(), (_ids(), _ids()), _token_loss, _ids(), named)


def _torch_transformer() -> Case:
    model = nn.Transformer(WIDTH, 2, 2, 2, 2 * WIDTH, dropout=0.2, batch_first=True)
    return Case(model, (vectors(4, WIDTH), vectors(3, WIDTH)), mean_square, draws=True)


def _torch_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    padding = torch.zeros(ROWS, 4, dtype=torch.bool)
    padding[::2, 3:] = True
    return Case(model, (vectors(4, WIDTH),), mean_square, kwargs={"src_key_padding_mask": padding})


CASES: dict[str, Callable[[], Case]] = {
    "pre_norm": lambda: _language(pre=True),
    "post_norm": lambda: _language(pre=False),
    "padding_mask": lambda: _language(pre=True, padded=True),
    "tied_embedding": lambda: Case(Tied(), (_ids(),), _token_loss, _ids(), ties=True),
    "vision_transformer": lambda: Case(
        Vision(), (vectors(3, 4, 4),), F.cross_entropy, torch.randint(5, (ROWS,))
    ),
    "encoder_decoder": _encoder_decoder,
    "attention_pooling": lambda: Case(Pooling(), (vectors(4, 8),), _pooling_loss, vectors(2)),
    "torch_transformer": _torch_transformer,
    "torch_encoder": _torch_encoder,
}
