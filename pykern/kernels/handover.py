"""Operations whose backward comes in two parts: gradients of inputs, then gradients of weights.

torch runs a custom function's backward as a whole, and does not tell it which gradients are wanted.
Here a backward returns the gradients of its inputs, and a function that computes the gradients of
weights. An ordinary backward calls that function at once; a split backward takes it, and calls it
later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .. import _C
from ..torch_private import multithreading, set_multithreading

# Computes the gradients of some arguments, by their position.
Weights = Callable[[], dict[int, Tensor]]
# Called with a node, and with a function that computes the gradients of some of its edges.
Take = Callable[[Node, Weights], None]


class _TakeOfThread(threading.local):
    take: Take | None = None


_local = _TakeOfThread()


def refuse_second_derivatives() -> None:
    """Raises RuntimeError in a backward that is to be differentiated itself.

    If the incoming gradient does not require grad, torch would not refuse a second backward of
    `once_differentiable`, but silently leave the operation out.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph must be False, got True. Fused operations have no second derivatives: "
            "compute these with torch's own operations"
        )


class TwoParts(torch.autograd.Function):
    """An autograd function that can compute the gradients of its weights separately.

    A subclass has `compute(ctx, *arguments)` in place of `forward`. In place of `backward` it has
    `gradients(ctx, *gradients)`, which returns the gradients of all arguments, None for weights,
    and a function that computes the gradients of weights.

    Attributes:
        weights: positions of the arguments whose gradients the second part computes.
    """

    weights: ClassVar[Sequence[int]] = ()

    @staticmethod
    def compute(ctx: Any, *arguments: Any) -> Any:
        """Computes the results."""
        raise NotImplementedError

    @staticmethod
    def gradients(ctx: Any, *gradients: Tensor) -> tuple[list[Tensor | None], Weights]:
        """Computes the gradients of the arguments, in two parts."""
        raise NotImplementedError

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """Runs `compute`, called by autograd."""
        # A node has one edge for each tensor argument, in the order of arguments.
        ctx.edges = [i for i, argument in enumerate(arguments) if isinstance(argument, Tensor)]
        return ctx._forward_cls.compute(ctx, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Runs `gradients`, called by autograd."""
        refuse_second_derivatives()
        results, weights = ctx._forward_cls.gradients(ctx, *gradients)
        if not any(ctx.needs_input_grad[position] for position in ctx._forward_cls.weights):
            return tuple(results)
        if _local.take is not None:
            edge_of = {position: edge for edge, position in enumerate(ctx.edges)}
            _local.take(ctx, lambda: {edge_of[i]: grad for i, grad in weights().items()})
            return tuple(results)
        for position, gradient in weights().items():
            results[position] = gradient
        return tuple(results)


def edges_of_weights(node: Node) -> list[int] | None:
    """The edges of a node to weights that need gradients; None if it is not a TwoParts."""
    function = getattr(node, "_forward_cls", None)
    if function is None or not issubclass(function, TwoParts):
        return None
    custom: Any = node
    needed = custom.needs_input_grad
    return [
        edge
        for edge, position in enumerate(custom.edges)
        if position in function.weights and needed[position]
    ]


def are_taken() -> bool:
    """Whether the second part of a backward that runs now is called later, and not at once.

    The first part of a backward asks this if it can compute both parts together more cheaply.
    """
    return _local.take is not None


def taking(take: Take) -> AbstractContextManager[object]:
    """A context in which backwards of this thread hand over the functions of their second parts.

    Backwards run on this thread: otherwise autograd would use its own threads for CUDA tensors.

    Args:
        take: called with each node and a function that returns gradients by edge of the node.
    """
    before = _local.take, multithreading()
    return _C.Within(partial(_set, take, False), lambda _: _set(*before))


def _set(take: Take | None, threads: bool) -> None:
    _local.take = take
    set_multithreading(threads)
