"""A pipeline as one autograd operation: its forward runs forwards, its backward runs backwards.

Huang et al., 2019 (arXiv 1811.06965) order a step in this way: all forwards, then all backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.head_loss import LazyLogits
from ..tensors.trees import all_tensors, map_nodes, map_tensors
from . import microbatch
from .autograd.cut import Cut, cut, hidden_in
from .stage.stage import Ends

# By microbatch, the gradients of its outputs.
OutputGradients = Mapping[int, Sequence[Tensor | None]]
# Gets gradients of outputs, and a function to call when nothing can refuse the backward any more;
# returns the gradients of the inputs of the operation.
RunBack = Callable[[OutputGradients, Callable[[], None]], Sequence[Tensor | None]]


class GraphEnds:
    """Takes the outputs of the last stage, with their autograd graphs.

    Args:
        weights: of the microbatches, for the sum of outputs without dimensions.
        gradients: the gradients that backwards start from; None in a forward.

    Attributes:
        cuts: by microbatch.
        gradients: empty in a forward.
    """

    # Autograd has checked that gradients have the shapes and types of the outputs.
    knows_gradients = True
    # The graphs are kept for another step, in which backwards run.
    keeps_graphs = True

    def __init__(self, weights: Sequence[float], gradients: OutputGradients | None = None) -> None:
        self._weights = weights
        self.cuts: dict[int, Cut] = {}
        self.gradients = gradients or {}

    def __call__(self, index: int, output: Any, _: bool) -> Ends:
        """Takes the output of a microbatch."""
        hidden = {type(one).__name__ for one in hidden_in(output)}
        if hidden:
            raise TypeError(
                f"the model must return tensors in tuples, lists, dicts or what else "
                f"torch.utils._pytree knows for gradients to come back, got "
                f"{', '.join(sorted(hidden))}. Register it there, or call the pipeline under "
                "torch.no_grad()"
            )
        found = self.cuts[index] = cut(map_nodes(LazyLogits, _logits, output))
        return found.outputs, self.gradients.get(index, ())

    def merged(self, made: dict[int, Tensor]) -> Any:
        """The output for the whole batch.

        Args:
            made: by identity of a leaf behind a cut, its tensor in the graph outside.
        """
        ran = sorted(self.cuts)

        def outside(tensor: Tensor) -> Tensor:
            return made.get(id(tensor), tensor)

        values = [self.cuts[index].value for index in ran]
        parts = [
            outside(value) if isinstance(value, Tensor) else map_tensors(outside, value)
            for value in values
        ]
        return microbatch.merge(parts, [self._weights[index] for index in ran])


def _logits(lazy: LazyLogits) -> Tensor:
    """The logits of a `LazyLogits`, which no fused loss consumes here."""
    return F.linear(lazy.hidden, lazy.weight)


class PipelineCall(torch.autograd.Function):
    """The operation. Its inputs get gradients, and its outputs bring them."""

    @staticmethod
    def forward(ctx: Any, made: ForwardPass, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the outputs, which are computed already."""
        del inputs
        ctx.set_materialize_grads(False)
        ctx.made = made
        return tuple([leaf.detach() for leaf in made.leaves])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs, from the gradients of the outputs."""
        return None, *ctx.made.backward(gradients)


class ForwardPass:
    """One forward of a pipeline, until its backward has run.

    Args:
        ends: of the forward.
        run_back: runs the backwards.
    """

    def __init__(self, ends: GraphEnds, run_back: RunBack) -> None:
        self.leaves = [leaf for cut in ends.cuts.values() for leaf in cut.leaves]
        self._shares = [(index, len(cut.leaves)) for index, cut in ends.cuts.items()]
        self._run_back: RunBack | None = run_back

    def outputs(self, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """By identity of its leaf, each output as a tensor of the graph outside."""
        if not self.leaves:
            return {}
        made = PipelineCall.apply(self, *inputs)  # type: ignore[no-untyped-call]
        leaves, self.leaves = self.leaves, []
        return {id(leaf): one for leaf, one in zip(leaves, made, strict=True)}

    def backward(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Runs the backwards, once.

        Raises:
            RuntimeError: the backwards have run already, `create_graph` is set, or the pipeline is
                running. A backward that is refused may be called again.
            BaseException: as for `Pipeline.step`.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph must be False for a backward through a pipeline, got True. A "
                "pipeline has no second derivatives: compute these with the layers themselves"
            )
        run_back = self._require_left()
        share: dict[int, Sequence[Tensor | None]] = {}
        start = 0
        for index, count in self._shares:
            share[index] = gradients[start : start + count]
            start += count
        return run_back(share, self._begin)

    def _require_left(self) -> RunBack:
        if self._run_back is None:
            raise RuntimeError(
                "a backward through this call of a pipeline has run already, and its stages have "
                "freed their graphs (retain_graph does not reach them). Add up the losses and "
                "call backward() once, or call the pipeline once more"
            )
        return self._run_back

    def _begin(self) -> None:
        # Another thread may have run the backwards while this one came to the claim.
        self._require_left()
        self._run_back = None


class Refused(torch.autograd.Function):
    """Outputs of a pipeline that cannot run backward: a backward raises with the reason."""

    @staticmethod
    def forward(ctx: Any, reason: str, anchor: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        """The same outputs."""
        del anchor
        ctx.reason = reason
        return tuple([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Raises RuntimeError."""
        del gradients
        raise RuntimeError(ctx.reason)


def refuse_backward(output: Any, reason: str, anchor: Tensor) -> Any:
    """Returns the output of a forward such that its backward raises RuntimeError.

    Args:
        output: any tree.
        reason: the message.
        anchor: any tensor that requires grad.
    """
    if isinstance(output, Tensor):
        return Refused.apply(reason, anchor, output)[0]  # type: ignore[no-untyped-call]
    floating = [t for t in all_tensors(output) if t.is_floating_point() or t.is_complex()]
    made = Refused.apply(reason, anchor, *floating)  # type: ignore[no-untyped-call]
    by_id = {id(old): new for old, new in zip(floating, made, strict=True)}
    return map_tensors(lambda tensor: by_id.get(id(tensor), tensor), output)
