"""Chooses the experts of each token, and the order of each expert's tokens, without the host.

All sizes follow from the number of tokens, of experts and of choices, never from the choice itself.
So the host reads no value back, and a CUDA graph can capture the routing. Ties go to the lower
index, and rows of one expert keep the order of tokens: the same logits always give the same bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .handover import refuse_second_derivatives
from .operation import define, wide


class Routing(NamedTuple):
    """The choice, for T tokens with num_chosen experts each. A *row* is a token for one expert.

    Attributes:
        weights: float32 (float64 for such logits) [T, num_chosen], differentiable.
        experts: int32 [T, num_chosen], from the highest logit down.
        order: int32 [T * num_chosen], a permutation: rows are sorted by their expert, and row r is
            choice `order[r] % num_chosen` of token `order[r] // num_chosen`.
        places: int32 [T * num_chosen], the inverse of `order`: the row of each token's choices.
        ends: int32 [num_experts]: the rows of expert e end before row `ends[e]`.
    """

    weights: Tensor
    experts: Tensor
    order: Tensor
    places: Tensor
    ends: Tensor


def chosen(logits: Tensor, num_chosen: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The operation in plain torch.

    Args:
        logits: floating [T, num_experts].
        num_chosen: experts of a token.

    Returns:
        The fields of a `Routing`.
    """
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
    by_expert, order = experts.flatten().sort(stable=True)
    rows = torch.arange(order.numel(), device=order.device)
    places = torch.empty_like(order).scatter_(0, order, rows)
    columns = torch.arange(logits.shape[1], device=order.device)
    ends = torch.searchsorted(by_expert, columns, right=True)
    weights = _shares(logits, experts).gather(1, experts)
    # `to` copies here: an operation must not return views of shared memory.
    return weights, *(x.to(torch.int32) for x in (experts, order, places, ends))  # type: ignore[return-value]


def chosen_gradient(gradient: Tensor, logits: Tensor, experts: Tensor) -> Tensor:
    """The gradient of the logits, as `logits`, from the gradient of the weights."""
    shares = _shares(logits, experts.long())
    wanted = torch.zeros_like(shares).scatter(1, experts.long(), gradient)
    mean = (wanted * shares).sum(-1, keepdim=True)
    return (shares * (wanted - mean)).to(logits.dtype)


def _shares(logits: Tensor, experts: Tensor) -> Tensor:
    """Weights of all experts: softmax over the chosen ones, or over all if only one is chosen."""
    scores = wide(logits)
    if experts.shape[1] > 1:
        left_out = torch.ones_like(scores, dtype=torch.bool).scatter(1, experts, False)
        scores = scores.masked_fill(left_out, float("-inf"))
    return torch.softmax(scores, dim=-1)


_route = define(
    "route(Tensor logits, int num_chosen) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", chosen
)
_route_gradient = define(
    "route_gradient(Tensor gradient, Tensor logits, Tensor experts) -> Tensor", chosen_gradient
)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, num_chosen: int) -> Any:
        routing = _route(logits, num_chosen)
        ctx.save_for_backward(logits, routing[1])
        ctx.mark_non_differentiable(*routing[1:])
        return routing

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        refuse_second_derivatives()
        return _route_gradient(gradients[0], *ctx.saved_tensors), None


def route(logits: Tensor, num_chosen: int) -> Routing:
    """Chooses the experts of each token: the experts with the highest logits.

    Args:
        logits: float32, bfloat16, float16 or float64 [.., num_experts], of T tokens in all.
        num_chosen: experts of a token, 1 <= num_chosen <= num_experts.

    Returns:
        The choice. A token's weights are the softmax over the logits of its chosen experts, as in
        Mixtral. With one chosen expert, the weight is its probability among all experts, as in
        Switch: a softmax over one logit could not be learnt. The operation saves the logits and the
        choice.

    Raises:
        ValueError: the type is not floating, `num_chosen` is out of range, or there are 2**31 rows
            or more.

    Paper: W. Fedus et al., "Switch Transformers", JMLR 2022, arXiv 2101.03961, section 2.1;
        A. Jiang et al., "Mixtral of Experts", 2024, arXiv 2401.04088, section 2.1.
    """
    if logits.dim() == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating point [.., num_experts], got {logits.dtype} "
            f"{list(logits.shape)}"
        )
    num_experts = logits.shape[-1]
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(
            f"num_chosen must be 1 to {num_experts}, the number of experts, got {num_chosen}"
        )
    num_rows = logits.numel() // num_experts * num_chosen
    if num_rows >= 2**31:
        raise ValueError(f"rows must be below 2**31, got {num_rows}. Route fewer tokens at once")
    return Routing(*_Route.apply(logits.reshape(-1, num_experts), num_chosen))  # type: ignore[no-untyped-call]


def balance_loss(logits: Tensor, routing: Routing) -> Tensor:
    """Switch's auxiliary loss: num_experts * sum over experts of (share of rows * probability).

    Args:
        logits: as given to `route`.
        routing: the result of `route`.

    Returns:
        A scalar of the type of the weights. It is 1 when all experts have the same share,
        up to num_experts when all rows go to one expert; 0 without tokens. The gradient goes
        through the mean probabilities.

    Raises:
        ValueError: the routing is of other logits.

    Paper: W. Fedus et al., "Switch Transformers", JMLR 2022, arXiv 2101.03961, section 2.2.
    """
    num_experts = logits.shape[-1]
    num_tokens = len(routing.experts)
    if len(routing.ends) != num_experts or num_tokens * num_experts != logits.numel():
        raise ValueError(
            f"logits must be those of the routing, of {num_tokens} tokens to {len(routing.ends)} "
            f"experts, got {list(logits.shape)}"
        )
    counts = routing.ends.diff(prepend=routing.ends.new_zeros(1))
    probabilities = torch.softmax(wide(logits).reshape(-1, num_experts), dim=-1)
    total = torch.dot(probabilities.sum(0), counts.to(probabilities.dtype))
    return total * (num_experts / max(num_tokens * routing.order.numel(), 1))
