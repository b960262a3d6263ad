"""Rotary position embedding of packed queries and keys, which saves no tensor for its backward.

Element i of the first half of a head and element i of the second are rotated together, by an angle
of position * base ** (-2 i / head_dim): the half-split form of Llama. A gradient is rotated back.
Each call computes the angles: in float64, or on GPUs in whole numbers of 64 bits. They are accurate
at any position, and a model that is moved to another type has no table that must stay in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .handover import refuse_second_derivatives
from .operation import define, wide


def turned(
    qkv: Tensor, num_heads: int, num_kv_heads: int, base: float, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The operation in plain torch; see `rope`. Results are contiguous in [.., seq, heads, dim]."""
    heads = qkv.unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=-2)
    cos, sin = _cos_sin(qkv, q.shape[-1], base, offset)
    moved = (_turn(q, cos, sin), _turn(k, cos, sin), v.clone(memory_format=torch.contiguous_format))
    return moved[0].transpose(-3, -2), moved[1].transpose(-3, -2), moved[2].transpose(-3, -2)


def turned_back(q: Tensor, k: Tensor, v: Tensor, base: float, offset: int) -> Tensor:
    """The gradient of `turned` from the gradients of its results, packed and contiguous."""
    q, k, v = (gradient.transpose(-3, -2) for gradient in (q, k, v))
    cos, sin = _cos_sin(q[..., 0, :], q.shape[-1], base, offset)
    return torch.cat((_turn(q, cos, -sin), _turn(k, cos, -sin), v), dim=-2).flatten(-2)


def _cos_sin(like: Tensor, head_dim: int, base: float, offset: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, [seq, 1, head_dim / 2] in the type of sums."""
    options: Any = {"dtype": torch.float64, "device": like.device}
    positions = torch.arange(offset, offset + like.shape[-2], **options)
    pairs = torch.arange(head_dim // 2, **options)
    angles = positions[:, None, None] * torch.exp2(pairs * (-2 * math.log2(base) / head_dim))
    kind = torch.promote_types(like.dtype, torch.float32)
    return torch.cos(angles).to(kind), torch.sin(angles).to(kind)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = wide(x).chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).to(x.dtype)


_rope = define(
    "rope(Tensor qkv, int num_heads, int num_kv_heads, float base, int offset)"
    " -> (Tensor, Tensor, Tensor)",
    turned,
)
_rope_gradient = define(
    "rope_gradient(Tensor q, Tensor k, Tensor v, float base, int offset) -> Tensor", turned_back
)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, num_heads: int, num_kv_heads: int, *place: Any) -> Any:
        ctx.place = place
        return _rope(qkv, num_heads, num_kv_heads, *place)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        return _rope_gradient(*gradients, *ctx.place), None, None, None, None


def rope(
    qkv: Tensor, num_heads: int, num_kv_heads: int, *, base: float = 10000.0, offset: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits a packed projection into queries, keys and values, and rotates queries and keys.

    Args:
        qkv: float32, bfloat16, float16 or float64 [.., seq, (num_heads + 2 * num_kv_heads) *
            head_dim]: the heads of queries, then of keys, then of values.
        num_heads: of queries.
        num_kv_heads: of keys and of values, a divisor of `num_heads`.
        base: of the angles; a larger base gives longer wavelengths.
        offset: the position of the first element of seq.

    Returns:
        q [.., num_heads, seq, head_dim], k and v [.., num_kv_heads, seq, head_dim] as `qkv`, for
        `scaled_dot_product_attention`. In memory, seq comes before heads. Results are computed in
        float32 and rounded once; v is a copy, so that the memory of `qkv` can be freed.

    Raises:
        ValueError: sizes do not fit each other, the type is not floating, the base is at most 1 or
            not finite, or the offset is negative.

    Paper: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
        arXiv 2104.09864, section 3.4.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            "num_heads must be a multiple of num_kv_heads, which must be at least 1, got "
            f"{num_heads} and {num_kv_heads}"
        )
    total = num_heads + 2 * num_kv_heads
    if qkv.dim() < 2 or qkv.shape[-1] == 0 or qkv.shape[-1] % (2 * total):
        raise ValueError(
            f"qkv must be [.., seq, {total} heads * head_dim] with an even head_dim, got "
            f"{list(qkv.shape)}"
        )
    if not qkv.is_floating_point():
        raise ValueError(f"qkv must be floating point, got {qkv.dtype}")
    if not 1 < base < math.inf:
        raise ValueError(f"base must be above 1 and finite, got {base}")
    if offset < 0:
        raise ValueError(f"offset must be at least 0, got {offset}")
    return _Rope.apply(qkv, num_heads, num_kv_heads, base, offset)  # type: ignore[no-any-return,no-untyped-call]
