"""The end of F: the output of a stage goes to the next stage, or becomes a loss.

Each hand-over gets a microbatch and the output of the last layer, and returns the tensors that
backward starts from. A stage that begins a plain step composes its hand-over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...tensors.trees import tensors_of
from ...trace import Environment
from ..autograd.cut import cut, hidden_in
from .skips import apart, ends_of
from .transport import There

if TYPE_CHECKING:
    from .stage import Stage

# Gets a microbatch, and the output of the last layer.
HandOver = Callable[[int, Any], Sequence[Tensor]]


def to_next(stage: Stage, there: There | None = None) -> HandOver:
    """Gives the next stage a tensor, by `there` in other memory; other values `by_transport`."""
    following, reader = stage.next, stage.index + 1
    assert following is not None

    def hand_over(microbatch: int, output: Any) -> Sequence[Tensor]:
        if not isinstance(output, Tensor):
            return by_transport(stage, microbatch, output)
        leaf = output.detach()
        if there is not None:
            (leaf,) = there(microbatch, reader, (leaf,))
        following.arguments[microbatch] = (leaf,)
        if not output.requires_grad:
            following.leaves[microbatch] = ()
            return ()
        following.leaves[microbatch] = (leaf.requires_grad_(),)
        return (output,)

    return hand_over


def values_to_next(stage: Stage) -> HandOver:
    """As `to_next`, for the values that a recorded forward hands over."""
    following, way, send = stage.next, stage.index + 1, stage.parcels.send
    assert following is not None

    def hand_over(microbatch: int, output: Any) -> Sequence[Tensor]:
        values = output.values
        near, farther = output.cut_tape.ways[way]
        # A tensor that occurs twice stays one tensor, which takes longer.
        if len(near) > 1 and len({id(values[number]) for number in near}) < len(near):
            return by_transport(stage, microbatch, output)
        landed: dict[int, Tensor] = {}
        outputs: list[Tensor] = []
        leaves: list[Tensor] = []
        for number in near:
            value = values[number]
            landed[number] = leaf = value.detach()
            if value.requires_grad:
                outputs.append(value)
                leaves.append(leaf.requires_grad_())
        output.values = landed
        following.arguments[microbatch] = (output,)
        following.leaves[microbatch] = leaves
        if farther:
            outputs += send(microbatch, values, farther, None)
        return tuple(outputs)

    return hand_over


def by_transport(stage: Stage, microbatch: int, output: Any) -> Sequence[Tensor]:
    """Gives the next stage, and farther stages, any tree, by the stage's transport.

    Raises:
        TypeError: the stage is recomputed, and the tree hides tensors of the graph.
    """
    following = stage.next
    assert following is not None
    if stage.recomputed.has(microbatch):
        _require_cuttable(stage, output)
    near, farther = apart(output, stage.index)
    handed = cut(near, partial(stage.transport.there, microbatch, stage.index + 1))
    following.arguments[microbatch] = (handed.value,)
    following.leaves[microbatch] = handed.leaves
    if not farther:
        return handed.outputs
    ends = stage.parcels.send(microbatch, output.values, farther, stage.transport.there)
    return (*handed.outputs, *ends)


def _require_cuttable(stage: Stage, output: Any) -> None:
    names = {type(hidden).__name__ for hidden in hidden_in(output)}
    if names:
        raise TypeError(
            f"stage {stage.index} must hand over tensors in tuples, lists, dicts or other "
            f"containers of torch.utils._pytree, got {', '.join(sorted(names))}, which holds "
            "tensors that require grad. Register it there to recompute the stage, or cut elsewhere"
        )


def to_the_end(stage: Stage, keep: Callable[[Any], Any] | None = None) -> HandOver:
    """Gives the last stage's output to the step's `finish`; `keep` may move it to own memory."""
    gradients, finish = stage.gradients, stage.finish
    assert finish is not None
    # `once` is the same for all microbatches, or gradients would add up in another order.
    once = not stage.recomputed.in_use

    def hand_over(microbatch: int, output: Any) -> Sequence[Tensor]:
        if keep is not None:
            output = keep(output)
        outputs, gradients[microbatch] = finish(microbatch, output, once)
        return outputs

    return hand_over


def again(stage: Stage, microbatch: int, output: Any) -> Sequence[Tensor]:
    """The end of an R, as of F; but the next stage has its values already."""
    if stage.next is None:
        return stage.hand_over(microbatch, output)
    if isinstance(output, Tensor):
        return (output,) if output.requires_grad else ()
    if not isinstance(output, Environment):
        return tuple([tensor for tensor in tensors_of(output) if tensor.requires_grad])
    near, farther = output.cut_tape.ways[stage.index + 1]
    values = output.values
    once = {id(values[number]): values[number] for number in near}
    ends = ends_of(values, farther) if farther else ()
    return (*[value for value in once.values() if value.requires_grad], *ends)
