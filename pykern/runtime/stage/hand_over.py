"""The end of F: what a stage returns goes to the next one, or becomes a loss.

Each function returns the tensors that backward starts from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..autograd.cut import cut, hidden_in
from .skips import apart, ends_of

if TYPE_CHECKING:
    from .stage import Stage

# Gets a stage, a microbatch, and what the last layer has returned.
HandOver = Callable[["Stage", int, Any], Sequence[Tensor]]


def to_next(stage: Stage, microbatch: int, output: Any) -> Sequence[Tensor]:
    """Gives the next stage a tensor in the same memory; anything else goes by `by_passage`."""
    if not isinstance(output, Tensor):
        return by_passage(stage, microbatch, output)
    following = stage.next
    assert following is not None
    leaf = output.detach()
    following.arguments[microbatch] = (leaf,)
    if not output.requires_grad:
        following.leaves[microbatch] = ()
        return ()
    following.leaves[microbatch] = (leaf.requires_grad_(),)
    return (output,)


def by_passage(stage: Stage, microbatch: int, output: Any) -> Sequence[Tensor]:
    """Gives the next stage, and farther ones, any tree, by the stage's way out.

    Raises:
        TypeError: the stage is recomputed, and the tree hides tensors of the graph.
    """
    following = stage.next
    assert following is not None
    if stage.recomputed.has(microbatch):
        _require_cuttable(stage, output)
    near, farther = apart(output, stage.index)
    handed = cut(near, partial(stage.passage.there, microbatch, stage.index + 1))
    following.arguments[microbatch] = (handed.value,)
    following.leaves[microbatch] = handed.leaves
    if not farther:
        return handed.outputs
    stage.parcels.send(microbatch, farther, stage.passage)
    return (*handed.outputs, *ends_of(farther))


def _require_cuttable(stage: Stage, output: Any) -> None:
    names = {type(hidden).__name__ for hidden in hidden_in(output)}
    if names:
        raise TypeError(
            f"stage {stage.index} is recomputed and hands over {', '.join(sorted(names))}, "
            "which holds tensors that require grad: a graph can be cut in tuples, lists, dicts "
            "and what else torch.utils._pytree knows, and in nothing else"
        )


def to_the_end(stage: Stage, microbatch: int, output: Any) -> Sequence[Tensor]:
    """Gives the output of the last stage to whoever has begun the step."""
    assert stage.finish is not None
    # Were it for this microbatch alone, gradients would add up in another order.
    once = not stage.recomputed.in_use
    outputs, gradients = stage.finish(microbatch, stage.passage.keep(output), once)
    stage.gradients[microbatch] = gradients
    return outputs


def again(stage: Stage, microbatch: int, output: Any) -> Sequence[Tensor]:
    """As the end of F, for an R, after which the next stage has everything."""
    if stage.next is None:
        return to_the_end(stage, microbatch, output)
    near, farther = apart(output, stage.index)
    return (*cut(near).outputs, *ends_of(farther))
