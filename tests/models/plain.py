"""The models in plain torch: the same parameters under the same names, none of our kernels."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pykern.models.blocks import Head
from pykern.models.gpt import MLP, Attention, Embedding
from pykern.models.llama import EPS, GatedMLP, RotaryAttention
from pykern.models.moe import Experts


def plain(model: nn.Sequential) -> nn.Sequential:
    """A copy of a model of pykern's whose layers compute in plain torch, without dropout."""
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if type(module) in _PLAIN:
            module.__class__ = _PLAIN[type(module)]
    return twin


class PlainRMSNorm(nn.RMSNorm):
    """As in the first Llama's code, in float32 and step by step."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = wide.pow(2).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean + EPS)).to(x.dtype) * self.weight


class PlainEmbedding(Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions.weight[: ids.shape[1]]


class PlainAttention(Attention):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None
        )
        return x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))


class PlainMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(F.gelu(self.expand(self.norm(x))))


class PlainRotaryAttention(RotaryAttention):
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.qkv(self.norm(x)).view(batch, length, -1, width // self.heads)
        turning, value = packed.split([self.heads + self.kv_heads, self.kv_heads], dim=2)
        query, key = rotated(turning, self.base).split([self.heads, self.kv_heads], dim=2)
        mixed = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.contiguous().transpose(1, 2),
            is_causal=True,
            enable_gqa=True,
        )
        return x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))


def rotated(x: Tensor, base: float) -> Tensor:
    """Rotary positions of [batch, seq, heads, size]."""
    length, half = x.shape[1], x.shape[-1] // 2
    wavelengths = base ** (torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(length, dtype=torch.float64)[:, None, None] / wavelengths
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    first, second = wide[..., :half], wide[..., half:]
    cos, sin = angles.cos().to(wide.dtype), angles.sin().to(wide.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1).to(x.dtype)


class PlainGatedMLP(GatedMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        return x + self.project(F.silu(gate) * up)


class PlainExperts(Experts):
    """Every expert looks for its tokens."""

    def forward(self, balanced: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, balance = balanced
        flat = self.norm(x).flatten(0, -2)
        logits = self.router(flat).to(torch.promote_types(x.dtype, torch.float32))
        scores, chosen = logits.topk(self.num_chosen, dim=-1)
        weights = torch.softmax(scores, dim=-1)
        sums = torch.zeros_like(flat)
        for expert, (gate_up, project) in enumerate(zip(self.gate_up, self.project, strict=True)):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (flat[rows] @ gate_up.T).chunk(2, dim=-1)
            out = ((F.silu(gate) * up) @ project.T).to(flat.dtype)
            sums = sums.index_add(0, rows, out * weights[rows, place, None].to(flat.dtype))
        shares = F.one_hot(chosen, logits.shape[-1]).sum(1).to(logits.dtype).mean(0)
        chances = torch.softmax(logits, dim=-1).mean(0)
        unevenness = (shares / self.num_chosen * chances).sum() * logits.shape[-1]
        return x + sums.view(x.shape), balance + unevenness


class PlainHead(Head):
    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    nn.RMSNorm: PlainRMSNorm,
    Embedding: PlainEmbedding,
    Attention: PlainAttention,
    MLP: PlainMLP,
    RotaryAttention: PlainRotaryAttention,
    GatedMLP: PlainGatedMLP,
    Experts: PlainExperts,
    Head: PlainHead,
}
