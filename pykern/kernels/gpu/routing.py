"""Routing on GPUs: a stable counting sort. Blocks of tokens count, and sums give their places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import cdiv, next_power_of_2
from .launching import launched
from .rounding import rounded
from .rows import as_rows

# Logits of a program, unless one token has more.
_BLOCK = 2048
_MOST_TOKENS = 64


@triton.jit
def _keys(scores, columns, NUM_EXPERTS: tl.constexpr):
    """Keys that sort scores, NaN highest, and equal scores by their column, lowest first."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    ordered = tl.where(is_nan, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - columns)
    return tl.where(columns < NUM_EXPERTS, keys, -0x8000000000000000)


@launched
@triton.jit
def _choose(
    logits,
    weights,
    experts,
    counts,
    num_tokens,
    row_stride,
    TOKENS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    SLOTS: tl.constexpr,
):
    # Rows times their length may not fit into 32 bits.
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    slots = tl.arange(0, SLOTS)[None, :]
    inside = (tokens < num_tokens) & (columns < NUM_EXPERTS)
    scores = tl.load(logits + tokens * row_stride + columns, inside, 0.0).to(tl.float32)
    scores = tl.where(columns < NUM_EXPERTS, scores, float("-inf"))
    keys = _keys(scores, columns, NUM_EXPERTS)
    chosen = tl.zeros((TOKENS, SLOTS), tl.int32)
    values = tl.full((TOKENS, SLOTS), float("-inf"), tl.float32)
    count = tl.zeros((COLUMNS,), tl.int32)
    for slot in tl.static_range(NUM_CHOSEN):
        best = tl.max(keys, axis=1)[:, None]
        column = (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)
        here = columns == column
        value = tl.sum(tl.where(here, scores, 0.0), axis=1)[:, None]
        chosen = tl.where(slots == slot, column, chosen)
        values = tl.where(slots == slot, value, values)
        count += tl.sum((here & inside).to(tl.int32), axis=0)
        keys = tl.where(here, -0x8000000000000000, keys)
    # The highest chosen score is the highest of all, so both sums are relative to it.
    top = tl.max(values, axis=1)[:, None]
    shares = tl.exp(values - top)
    if NUM_CHOSEN == 1:
        total = tl.sum(tl.exp(scores - top), axis=1)[:, None]
    else:
        total = tl.sum(shares, axis=1)[:, None]
    places = tokens * NUM_CHOSEN + slots
    stored = (tokens < num_tokens) & (slots < NUM_CHOSEN)
    tl.store(experts + places, chosen, stored)
    tl.store(weights + places, shares / total, stored)
    ids = tl.arange(0, COLUMNS)
    tl.store(counts + ids * tl.num_programs(0) + tl.program_id(0), count, ids < NUM_EXPERTS)


@launched
@triton.jit
def _place(
    experts,
    sums,
    order,
    places,
    num_tokens,
    TOKENS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = tokens < num_tokens
    chosen = tl.zeros((TOKENS, COLUMNS), tl.int32)
    for slot in tl.static_range(NUM_CHOSEN):
        column = tl.load(experts + tokens * NUM_CHOSEN + slot, inside, -1)
        chosen += (columns == column).to(tl.int32)
    ends = tl.load(sums + columns * tl.num_programs(0) + tl.program_id(0), columns < NUM_EXPERTS, 0)
    # A token takes an expert once, so the count from it on gives its row's distance to the end.
    rows = ends - tl.cumsum(chosen, axis=0, reverse=True)
    for slot in tl.static_range(NUM_CHOSEN):
        choice = tokens * NUM_CHOSEN + slot
        column = tl.load(experts + choice, inside, -1)
        row = tl.sum(tl.where(columns == column, rows, 0), axis=1)[:, None]
        tl.store(places + choice, row, inside)
        tl.store(order + row, choice.to(tl.int32), inside)


@launched
@triton.jit
def _gradient(
    gradient,
    logits,
    experts,
    result,
    num_tokens,
    gradient_stride,
    row_stride,
    TOKENS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (tokens < num_tokens) & (columns < NUM_EXPERTS)
    scores = tl.load(logits + tokens * row_stride + columns, inside, 0.0).to(tl.float32)
    scores = tl.where(columns < NUM_EXPERTS, scores, float("-inf"))
    wanted = tl.zeros((TOKENS, COLUMNS), tl.float32)
    chosen = tl.zeros((TOKENS, COLUMNS), tl.int32)
    for slot in tl.static_range(NUM_CHOSEN):
        column = tl.load(experts + tokens * NUM_CHOSEN + slot, tokens < num_tokens, -1)
        of_weight = tl.load(gradient + tokens * gradient_stride + slot, tokens < num_tokens, 0.0)
        wanted = tl.where(columns == column, of_weight, wanted)
        chosen += (columns == column).to(tl.int32)
    if NUM_CHOSEN > 1:
        # Tokens behind the last one have chosen no expert; their scores stay finite.
        scores = tl.where((chosen > 0) | (tokens >= num_tokens), scores, float("-inf"))
    shares = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    shares /= tl.sum(shares, axis=1)[:, None]
    mean = tl.sum(wanted * shares, axis=1)[:, None]
    values = rounded(shares * (wanted - mean), result.dtype.element_ty)
    tl.store(result + tokens * NUM_EXPERTS + columns, values, inside)


def chosen(logits: Tensor, num_chosen: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `pykern.kernels.routing.chosen`."""
    logits = as_rows(logits)
    num_tokens, num_experts = logits.shape
    device, block = logits.device, _block(num_experts)
    # At least one program runs, so that sums exist without tokens, too.
    num_blocks = max(cdiv(num_tokens, block["TOKENS"]), 1)
    weights = torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=device)
    experts = torch.empty((num_tokens, num_chosen), dtype=torch.int32, device=device)
    counts = torch.empty((num_experts, num_blocks), dtype=torch.int32, device=device)
    slots = next_power_of_2(num_chosen)
    _choose[(num_blocks,)](
        logits,
        weights,
        experts,
        counts,
        num_tokens,
        logits.stride(0),
        NUM_CHOSEN=num_chosen,
        SLOTS=slots,
        **block,
    )
    sums = counts.view(-1).cumsum(0, dtype=torch.int32)
    order = torch.empty((num_tokens * num_chosen,), dtype=torch.int32, device=device)
    places = torch.empty((num_tokens * num_chosen,), dtype=torch.int32, device=device)
    _place[(num_blocks,)](experts, sums, order, places, num_tokens, NUM_CHOSEN=num_chosen, **block)
    return weights, experts, order, places, sums.view(num_experts, num_blocks)[:, -1].clone()


def chosen_gradient(gradient: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
    """See `pykern.kernels.routing.chosen_gradient`."""
    logits, gradient = as_rows(logits), as_rows(gradient)
    num_tokens, num_experts = logits.shape
    result = torch.empty((num_tokens, num_experts), dtype=logits.dtype, device=logits.device)
    if num_tokens == 0:
        return result
    block = _block(num_experts)
    _gradient[(cdiv(num_tokens, block["TOKENS"]),)](
        gradient,
        logits,
        experts,
        result,
        num_tokens,
        gradient.stride(0),
        logits.stride(0),
        NUM_CHOSEN=experts.shape[1],
        **block,
    )
    return result


def _block(num_experts: int) -> dict[str, int]:
    """The constants of a program's block, which only depend on the number of experts."""
    columns = next_power_of_2(num_experts)
    tokens = max(min(_BLOCK // columns, _MOST_TOKENS), 1)
    return {
        "TOKENS": tokens,
        "NUM_EXPERTS": num_experts,
        "COLUMNS": columns,
        "num_warps": 4,
    }
