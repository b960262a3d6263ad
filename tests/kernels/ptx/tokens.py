"""Rotary embedding, routing and sums of rows as operations to execute."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from pykern.kernels import routing as routing_twin
from pykern.kernels.gpu import rope, routing, row_sums
from tests.kernels.ptx.outcome import Given, Operation, Outcome

_HEADS, _KV_HEADS, _OFFSET = 32, 8, 100_003
_EXPERTS, _CHOSEN = 64, 8


def _turned(x: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """By complex numbers in float64, and the terms of each sum. Heads are [.., seq, head_dim]."""
    *_, seq, head_dim = x.shape
    half = head_dim // 2
    pairs = torch.arange(half, dtype=torch.float64)
    places = torch.arange(_OFFSET, _OFFSET + seq, dtype=torch.float64)
    angles = sign * places[:, None] * 10000.0 ** (-pairs / half)
    first, second = x.double().split(half, dim=-1)
    result = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    terms = torch.cat([first.abs() + second.abs()] * 2, dim=-1)
    return torch.cat((result.real, result.imag), dim=-1), terms


def _heads(given: Given) -> int:
    """Columns of a head: Llama's, or a few."""
    return 128 if given.shape.hidden >= 4096 else 24


def _rope(given: Given) -> Outcome:
    heads = (_HEADS, _KV_HEADS, _KV_HEADS)
    qkv = given.rows(sum(heads) * _heads(given))
    results = rope.turned(qkv, _HEADS, _KV_HEADS, 10000.0, _OFFSET)
    parts = qkv.unflatten(-1, (sum(heads), -1)).transpose(-3, -2).split(heads, dim=-3)
    outcome = Outcome([qkv])
    for actual, part in zip(results[:2], parts[:2], strict=True):
        outcome.near(actual, *_turned(part, 1))
    outcome.same(results[2], parts[2])
    return outcome


def _rope_back(given: Given) -> Outcome:
    heads = (_HEADS, _KV_HEADS, _KV_HEADS)
    seq, size = given.shape.rows, _heads(given)
    gradients = [given.rows(size, number * seq).view(number, seq, size) for number in heads]
    q, k, v = gradients
    packed = rope.turned_back(q, k, v, 10000.0, _OFFSET)
    parts = packed.unflatten(-1, (sum(heads), -1)).transpose(-3, -2).split(heads, dim=-3)
    outcome = Outcome(list(gradients))
    for part, gradient in zip(parts[:2], gradients[:2], strict=True):
        outcome.near(part, *_turned(gradient, -1))
    outcome.same(parts[2], gradients[2])
    return outcome


def _routed(given: Given, *, chosen: int) -> Outcome:
    # Whole numbers make ties.
    logits = given.rows(_EXPERTS, scale=4).round_()
    weights, *rest = routing.chosen(logits, chosen)
    promised = routing_twin.chosen(logits, chosen)
    outcome = Outcome([logits])
    scores, experts = logits.double(), promised[1].long()
    exact = (
        scores.softmax(-1).gather(1, experts)
        if chosen == 1
        else scores.gather(1, experts).softmax(-1)
    )
    steep = 4 + scores.abs().amax(-1, keepdim=True) if len(scores) else 4
    outcome.near(weights, exact, exact * steep)
    for actual, expected in zip(rest, promised[1:], strict=True):
        outcome.same(actual, expected)
    return outcome


def _routed_back(given: Given) -> Outcome:
    logits = given.rows(_EXPERTS, scale=2)
    gradient = torch.randn(given.shape.rows, _CHOSEN)
    experts = routing_twin.chosen(logits, _CHOSEN)[1]
    leaf = logits.double().requires_grad_()
    weights = leaf.gather(1, experts.long()).softmax(-1)
    (exact,) = torch.autograd.grad(weights, leaf, gradient.double())
    terms = gradient.double().abs().sum(1, keepdim=True).expand_as(exact)
    outcome = Outcome([logits, gradient, experts])
    outcome.near(routing.chosen_gradient(gradient, logits, experts), exact, terms)
    return outcome


def _summed(given: Given) -> Outcome:
    num_tokens, num_terms = given.shape.rows, 3
    rows = given.rows(given.shape.hidden, num_tokens * num_terms)
    places = torch.randperm(len(rows)).to(torch.int32).view(num_tokens, num_terms)
    terms = rows.double()[places.long()]
    outcome = Outcome([rows, places])
    outcome.near(row_sums.summed(rows, places), terms.sum(1), terms.abs().sum(1))
    return outcome


OPERATIONS: dict[str, Operation] = {
    "rope": _rope,
    "rope backward": _rope_back,
    "routing to 8 of 64": partial(_routed, chosen=_CHOSEN),
    "routing to 1 of 64": partial(_routed, chosen=1),
    "routing backward": _routed_back,
    "sums of rows": _summed,
}
