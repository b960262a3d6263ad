"""Rotary position embedding on GPUs: a program rotates all heads of a few tokens."""

from __future__ import annotations

from decimal import Context, Decimal, localcontext
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import cdiv, next_power_of_2
from .launching import launched
from .rounding import rounded
from .rows import as_rows

# Elements of one half of some heads that a program loads at a time.
_BLOCK = 1024
# Tokens of a program, which share the slopes of the angles.
_TOKENS = 4


@triton.jit
def _slopes(WIDTH: tl.constexpr, FACTORS: tl.constexpr):
    """Turns per position of each pair, base ** (-pair / half) / (2 pi), in units of 2 ** -64.

    Whole numbers need no float64, whose rate is 1 in 64 on many GPUs, and no table in memory.
    """
    pairs = tl.arange(0, WIDTH)[None, :]
    # 2 ** 64 / (2 pi).
    slopes = tl.full((1, WIDTH), 2935890503282001226, tl.uint64)
    # High bits come first: the pairs of a thread share them, and so their products.
    for index in tl.static_range(len(FACTORS)):
        factor = tl.full((1, WIDTH), FACTORS[index], tl.uint64)
        is_set = (pairs >> (len(FACTORS) - 1 - index)) & 1 == 1
        slopes = tl.where(is_set, tl.umulhi(slopes, factor), slopes)
    return slopes


@triton.jit
def _cos_sin(position, slopes):
    """Cosines and sines of a position's angles, with errors of some 2**-24.

    Whole turns overflow out of 64 bits, so the angle is off by position * 2**-60 turns at most.
    The nearest quarter turn is taken off in whole numbers, too, and the remaining angle needs a few
    terms; tl.cos supports any angle, which costs a hundred instructions and a stack.
    """
    turns = position.to(tl.uint64) * slopes
    quarter = ((turns + 2305843009213693952) >> 62).to(tl.int32)
    # Signed, in units of 2 ** -64 quarter turns. GPUs with a low rate of float64 have the same rate
    # of conversions from 64 bits, so each half is converted.
    rest = turns << 2
    high = (rest.to(tl.int64) >> 32).to(tl.int32).to(tl.float32)
    low = rest.to(tl.uint32).to(tl.float32)
    angle = high * 3.657295198167899e-10 + low * 8.515303950216386e-20
    # S. Moshier's polynomials (Cephes, sinf.c) for at most an eighth of a turn.
    z = angle * angle
    sin = ((-1.9515295891e-4 * z + 8.3321608736e-3) * z - 1.6666654611e-1) * z * angle + angle
    cos = (2.443315711809948e-5 * z - 1.388731625493765e-3) * z + 4.166664568298827e-2
    cos = cos * z * z - 0.5 * z + 1.0
    odd = (quarter & 1) == 1
    turned_cos = tl.where(odd, sin, cos)
    turned_sin = tl.where(odd, cos, sin)
    return (
        tl.where(((quarter + 1) & 2) == 2, -turned_cos, turned_cos),
        tl.where((quarter & 2) == 2, -turned_sin, turned_sin),
    )


@triton.jit
def _move(
    packed,
    apart,
    head_stride,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    TURN: tl.constexpr,
    BACK: tl.constexpr,
):
    """Moves heads of one token out of a packed row, or back into it; may rotate them."""
    columns = tl.arange(0, WIDTH)[None, :]
    for begin in range(0, NUM_HEADS, HEADS):
        heads = begin + tl.arange(0, HEADS)[:, None]
        inside = (heads < NUM_HEADS) & (columns < HALF)
        one = packed + heads * (2 * HALF) + columns
        other = apart + heads.to(tl.int64) * head_stride + columns
        source, target = (other, one) if BACK else (one, other)
        x = tl.load(source, inside)
        y = tl.load(source + HALF, inside)
        if TURN:
            turn = -sin if BACK else sin
            first, second = x.to(tl.float32), y.to(tl.float32)
            x = rounded(first * cos - second * turn, packed.dtype.element_ty)
            y = rounded(second * cos + first * turn, packed.dtype.element_ty)
        tl.store(target, x, inside)
        tl.store(target + HALF, y, inside)


@launched
@triton.jit
def _kernel(
    packed,
    q,
    k,
    v,
    packed_stride,
    num_tokens,
    seq,
    offset,
    q_batch,
    q_head,
    q_seq,
    k_batch,
    k_head,
    k_seq,
    v_batch,
    v_head,
    v_seq,
    TOKENS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    FACTORS: tl.constexpr,
    BACK: tl.constexpr,
):
    slopes = _slopes(WIDTH, FACTORS)
    # Rows times their length may not fit into 32 bits.
    begin = tl.program_id(0).to(tl.int64) * TOKENS
    for step in range(0, tl.minimum(TOKENS, num_tokens - begin)):
        token = begin + step
        batch, place = token // seq, token % seq
        cos, sin = _cos_sin(place + offset, slopes)
        here = packed + token * packed_stride
        q_here = q + batch * q_batch + place * q_seq
        k_here = k + batch * k_batch + place * k_seq
        v_here = v + batch * v_batch + place * v_seq
        _move(here, q_here, q_head, cos, sin, NUM_HEADS, HALF, WIDTH, HEADS, True, BACK)
        here += NUM_HEADS * 2 * HALF
        _move(here, k_here, k_head, cos, sin, NUM_KV_HEADS, HALF, WIDTH, HEADS, True, BACK)
        here += NUM_KV_HEADS * 2 * HALF
        _move(here, v_here, v_head, cos, sin, NUM_KV_HEADS, HALF, WIDTH, HEADS, False, BACK)


def turned(
    qkv: Tensor, num_heads: int, num_kv_heads: int, base: float, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `pykern.kernels.rope.turned`."""
    *leading, seq, width = qkv.shape
    head_dim = width // (num_heads + 2 * num_kv_heads)
    q, k, v = (
        torch.empty((*leading, seq, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    results = (q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2))
    _launch(as_rows(qkv), results, base, offset, back=False)
    return results


def turned_back(q: Tensor, k: Tensor, v: Tensor, base: float, offset: int) -> Tensor:
    """See `pykern.kernels.rope.turned_back`."""
    *leading, num_heads, seq, head_dim = q.shape
    width = (num_heads + 2 * k.shape[-3]) * head_dim
    packed = torch.empty((*leading, seq, width), dtype=q.dtype, device=q.device)
    _launch(as_rows(packed), (q, k, v), base, offset, back=True)
    return packed


def _launch(
    packed: Tensor, heads: tuple[Tensor, Tensor, Tensor], base: float, offset: int, *, back: bool
) -> None:
    if packed.numel() == 0:
        return
    q, k, v = (_one_batch(x) for x in heads)
    half = q.shape[-1] // 2
    width = next_power_of_2(half)
    at_once = min(next_power_of_2(q.shape[1]), max(_BLOCK // width, 1))
    _kernel[(cdiv(len(packed), _TOKENS),)](
        packed,
        q,
        k,
        v,
        packed.stride(0),
        len(packed),
        q.shape[2],
        offset,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        TOKENS=_TOKENS,
        NUM_HEADS=q.shape[1],
        NUM_KV_HEADS=k.shape[1],
        HALF=half,
        WIDTH=width,
        HEADS=at_once,
        FACTORS=_factors(base, half),
        BACK=back,
        # Eight bfloat16 elements of a thread make 128 bits.
        num_warps=max(min(at_once * width // 256, 4), 1),
    )


@cache
def _factors(base: float, half: int) -> tuple[int, ...]:
    """For each bit of a pair's index, base ** (-(2 ** bit) / half) in units of 2 ** -64.

    The highest bit comes first. The product of the factors of set bits is the slope of a pair.
    """
    with localcontext(Context(prec=40)):
        power = [Decimal(-(1 << bit)) / half for bit in reversed(range((half - 1).bit_length()))]
        return tuple(int(Decimal(base) ** exponent * 2**64) for exponent in power)


def _one_batch(x: Tensor) -> Tensor:
    """[batch, heads, seq, head_dim] with adjacent columns; a view wherever one is possible.

    Results of `turned` are contiguous apart from a transposition, so their batch is always a view.
    """
    flat = x.reshape(-1, *x.shape[-3:]) if x.dim() != 4 else x
    return flat if flat.stride(-1) == 1 else flat.contiguous()
