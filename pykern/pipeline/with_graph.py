"""Forwards whose backwards run when autograd asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .. import _C
from ..modes import Autocast, as_before, autocast, set_autocast
from ..once import once
from ..plan import Kind, Plan
from ..plan.halves import backward_half
from ..runtime.aliases import Aliases
from ..runtime.autograd.cut import cut
from ..runtime.batch import Batch, Enter
from ..runtime.driver import Program
from ..runtime.executor import AllLeft, Executor
from ..runtime.recompute.watch import without_saved_tensors_hooks
from ..runtime.through import ForwardPass, GraphEnds, Gradients, refuse_backward
from ..tensors.trees import Call, all_tensors
from ..torch_private import set_grad, top_hooks, transform
from .choose_levels import Levels


class WithGraph:
    """Runs the forwards of a pipeline as one operation of autograd.

    Args:
        executor: of the pipeline.
        plan: of its training steps.
        forwards: its forwards, ready to run.
        levels: what each forward keeps for its backward.
        refused: why there is no such operation; None where there is.
    """

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        forwards: Program,
        levels: Levels,
        refused: str | None,
    ) -> None:
        self._executor = executor
        self._plan = plan
        self._forwards = forwards
        self._levels = levels
        if refused is None and not (plan.has(Kind.B) or plan.has(Kind.I)):
            refused = "the plan has forward actions only: there is no backward through its output"
        self.refused = refused

    @once
    def _backwards(self) -> Program:
        return self._executor.part(backward_half(self._plan))

    def run(
        self,
        call: Call,
        rows: Sequence[int],
        weights: Sequence[float],
        enter: Enter,
        model: nn.Module,
    ) -> Any:
        """The output for the whole batch, in the graph of the caller.

        Args:
            call: arguments of the model, for all rows.
            rows: how many of them each microbatch has.
            weights: of the microbatches, for numbers.
            enter: as of a `Batch`.
            model: that the parameters belong to.
        """
        ends, begin = GraphEnds(weights), _Begin(enter)
        has_graph = any(tensor.requires_grad for tensor in all_tensors(call))
        batch = Batch(call, None, rows, ends, self._levels, begin if has_graph else enter)
        # First, for a forward that is recorded has to find the model's own parameters.
        _ = batch.calls
        aliases = Aliases(self._modules(model))
        with aliases.in_place(), _outside_checkpoints():
            aliases.take_place()
            left = self._executor.run(self._forwards, batch, self._executor.leave)
        back = partial(self._run_back, rows, weights, left, aliases, begin.leaves, autocast())
        made = ForwardPass(ends, back)
        return ends.merged(made.outputs((*begin.outside, *aliases.originals)))

    def _modules(self, model: nn.Module) -> list[nn.Module]:
        layers = [layer for stage in self._executor.stages for layer in stage.originals]
        return list(chain(model.modules(), *(layer.modules() for layer in layers)))

    def _run_back(
        self,
        rows: Sequence[int],
        weights: Sequence[float],
        left: AllLeft,
        aliases: Aliases,
        leaves: Sequence[Tensor],
        autocast_then: Autocast,
        gradients: Gradients,
    ) -> Sequence[Tensor | None]:
        """The gradients of the inputs of the operation; what is left is used up."""
        if any(of_stage.cells for of_stage in left[0]) and aliases.written:
            raise RuntimeError(
                "parameters have been written since the forward, which recompute would run again "
                "with other values: call optimizer.step() after the backward"
            )
        batch = Batch(((), {}), None, rows, GraphEnds(weights, gradients), self._levels)
        with _C.HoldForks(), as_before(), aliases.in_place():
            # As in the forward, of which R is a repetition.
            set_grad(True)
            set_autocast(autocast_then)
            aliases.take_place()
            self._executor.resume(self._backwards, batch, left, gradients)
        return [*(leaf.grad for leaf in leaves), *aliases.take_gradients()]

    def refuse(self, output: Any, call: Call, model: nn.Module) -> Any:
        """The output of a forward alone, through which a backward raises RuntimeError."""
        tensors = chain(model.parameters(), all_tensors(call))
        anchor = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if anchor is None or self.refused is None:
            return output
        return refuse_backward(output, self.refused, anchor)


class _Begin:
    """Cuts the graph in front of the first stage.

    Attributes:
        outside: the tensors before it that require grad, in the graph of the caller.
        leaves: for each of them, the one behind.
    """

    def __init__(self, enter: Enter) -> None:
        self._enter = enter
        self.outside: list[Tensor] = []
        self.leaves: list[Tensor] = []

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        found = cut((args, kwargs))
        self.outside += found.outputs
        self.leaves += found.leaves
        return self._enter(*found.value)


def _outside_checkpoints() -> AbstractContextManager[object]:
    """Keeps the caller's `torch.utils.checkpoint` from calling the pipeline within its backward."""
    hooks = top_hooks()
    is_checkpoint = hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
    return without_saved_tensors_hooks() if is_checkpoint else nullcontext()


def refuse_transforms(call: Call) -> None:
    """Raises RuntimeError where torch wants more of a forward than its result and one backward."""
    found = transform(all_tensors(call))
    if found is not None:
        raise RuntimeError(
            "a pipeline must be called outside of torch.func and of forward-mode differentiation, "
            f"got a call within {found}, which its workers do not see. Use the layers themselves "
            "there"
        )
