"""Runs tokens through the gated layers of their experts, and saves each token once.

The weight of a row is multiplied into its gated product. So backward has the same form as forward:
rows are gathered for the experts, and summed for the tokens. Backward recomputes the gathered rows
and the product; the routing is saved and reused, never recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import stash
from .grouped import outer, times
from .handover import TwoParts, Weights
from .operation import multiplied_type
from .routing import Routing
from .row_sums import row_sums
from .weighted_swiglu import weighted_swiglu, weighted_swiglu_gradient


class _Experts(TwoParts):
    """The operation on (x, gate_up, down, weights, order, places, ends, level)."""

    weights = (1, 2)

    @staticmethod
    def compute(ctx: Any, *arguments: Any) -> Tensor:
        x, gate_up, down, weights, order, places, ends, level = arguments
        ctx.dtypes = (x.dtype, gate_up.dtype, down.dtype)
        kind = multiplied_type(x)
        x = x.to(kind)
        with torch.autocast(x.device.type, enabled=False):
            rows = _rows(x, weights, order)
            pre = times(rows, gate_up.to(kind).mT, ends)
            product = weighted_swiglu(pre, weights, order)
            results = times(product, down.to(kind).mT, ends)
            y = row_sums(results, places.view_as(weights))
        # A frozen weight does not need its other operand again.
        aside = (rows, product) if level == "none" and any(ctx.needs_input_grad[1:3]) else ()
        kept = (*aside, *stash.packed(pre, level))
        ctx.num_aside = len(aside)
        ctx.save_for_backward(x, gate_up, down, weights, order, places, ends, *kept)
        return y  # type: ignore[no-any-return]

    @staticmethod
    def gradients(ctx: Any, *gradients: Tensor) -> tuple[list[Tensor | None], Weights]:
        x, gate_up, down, weights, order, places, ends, *kept = ctx.saved_tensors
        dtypes, (gradient,), needed = ctx.dtypes, gradients, ctx.needs_input_grad
        rows, product = kept[: ctx.num_aside] or (None, None)
        pre = stash.unpacked(kept[ctx.num_aside :], x.dtype)
        again = needed[2] and product is None
        with torch.autocast(x.device.type, enabled=False):
            of_results = _rows(gradient, weights, order)
            of_product = times(of_results, down.to(x.dtype), ends)
            of_pre, of_weights, remade = weighted_swiglu_gradient(
                of_product, pre, weights, order, again
            )
            of_rows = times(of_pre, gate_up.to(x.dtype), ends)
            of_x = row_sums(of_rows, places.view_as(weights)).to(dtypes[0])

        def weight_gradients() -> dict[int, Tensor]:
            found = {}
            with torch.autocast(x.device.type, enabled=False):
                if needed[1]:
                    right = _rows(x, weights, order) if rows is None else rows
                    found[1] = outer(of_pre, right, ends).to(dtypes[1])
                if needed[2]:
                    left = _rows(gradient, weights, order)
                    right = remade if product is None else product
                    found[2] = outer(left, right, ends).to(dtypes[2])
            return found

        return [of_x, None, None, of_weights, None, None, None, None], weight_gradients


def _rows(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The token of every row: [T * num_chosen, width]."""
    return x.index_select(0, order // weights.shape[1])


def experts(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of the outputs of each token's experts.

    Expert e computes `down[e] @ (silu(gate) * up)`, with gate and up the halves of
    `gate_up[e] @ x`. Products are rounded as in nn.Linear. The weight of an expert is multiplied
    into silu(gate) * up in float32, before the product is rounded. Sums over experts are in float32
    and rounded once.

    Args:
        x: float32, bfloat16, float16 or float64 [.., width], of T tokens in all.
        routing: of these tokens, from `routing.route`.
        gate_up: of the type of `x` [num_experts, 2 * hidden, width], gate before up.
        down: of the type of `x` [num_experts, width, hidden].

    Returns:
        As `x`. Within autocast, `x` and weights may have any type, and the result has autocast's.

    The operation saves `x` once, and for each row its gate and up, at level ops+stash in 8 bits,
    and 12 bytes of the routing; at level none also the operands of the products.

    Raises:
        ValueError: sizes, types or devices do not fit each other, or the rows of width or hidden
            are not multiples of 16 bytes, which grouped products need.

    The grouped products read the number of rows per expert on the device. GPUs have such products
    for bfloat16 only (compute capability 9 and 10). In other types, every row is multiplied with
    every expert, which is correct, and meant for tests.

    Paper: N. Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated
        Mixture-of-Experts Layer", ICLR 2017, arXiv 1701.06538; N. Shazeer, "GLU Variants Improve
        Transformer", 2020, arXiv 2002.05202.
    """
    _check(x, routing, gate_up, down)
    weights, _, order, places, ends = routing
    routed = (weights, order, places, ends)
    y = _Experts.apply(x.flatten(0, -2), gate_up, down, *routed, stash.level())  # type: ignore[no-untyped-call]
    return y.view(x.shape)  # type: ignore[no-any-return]


def _check(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> None:
    width = x.shape[-1] if x.dim() > 1 else -1
    num_experts, hidden = len(routing.ends), down.shape[-1] if down.dim() else -1
    expected = ((num_experts, 2 * hidden, width), (num_experts, width, hidden))
    if (gate_up.shape, down.shape) != expected:
        raise ValueError(
            f"x, gate_up and down must be [.., width], [{num_experts} experts, 2 * hidden, width] "
            f"and [{num_experts} experts, width, hidden], got {list(x.shape)}, "
            f"{list(gate_up.shape)} and {list(down.shape)}"
        )
    if len(routing.experts) * width != x.numel():
        raise ValueError(
            f"routing must be of the tokens of x, {list(x.shape)}, got one of "
            f"{len(routing.experts)} tokens"
        )
    tensors = (x, gate_up, down, routing.order)
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(
            "x, gate_up, down and routing must be on one device, got "
            f"{', '.join(str(tensor.device) for tensor in tensors)}"
        )
    kind = multiplied_type(x)
    same = torch.is_autocast_enabled(x.device.type) or {gate_up.dtype, down.dtype} == {kind}
    if not (x.is_floating_point() and same):
        raise ValueError(
            f"x, gate_up and down must have one floating type, got {x.dtype}, {gate_up.dtype} and "
            f"{down.dtype}"
        )
    step = 16 // kind.itemsize
    if width % step or hidden % step:
        raise ValueError(
            f"width and hidden must be multiples of {step} in {kind}, got {width} and {hidden}"
        )
