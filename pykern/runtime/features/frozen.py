"""Refuses gradients in stages that have no backward in the plan."""

from __future__ import annotations

from functools import partial

from ...plan import Kind, Plan
from ..stage.stage import Run, Stage
from .feature import Feature


class Frozen(Feature):
    """Refuses a gradient where the plan has no backward that would compute it.

    Args:
        plan: of training steps, some of whose first stages have forwards alone.
    """

    def __init__(self, plan: Plan) -> None:
        self._first_trained = plan.first_trained

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """The call for an action: `call` itself, or `call` and then the refusal."""
        if kind is Kind.F and stage.index < self._first_trained:
            return partial(self._forward, stage, call)
        return call

    def _forward(self, stage: Stage, call: Run, microbatch: int) -> None:
        call(microbatch)
        # A backward would start from these outputs. Earlier stages have not raised, so the gradient
        # is needed here or in the batch.
        if not stage.outputs[microbatch]:
            return
        layers = enumerate(stage.originals)
        named = ((place, *pair) for place, layer in layers for pair in layer.named_parameters())
        trained = [f"{name!r} of its layer {n}" for n, name, held in named if held.requires_grad]
        what = f"its parameter {trained[0]}" if trained else "the batch"
        raise RuntimeError(
            f"stage {stage.index} must have nothing to train, since the plan has backwards from "
            f"stage {self._first_trained} on alone, but {what} requires a gradient. Turn "
            "requires_grad off there, or make the pipeline with a plan that trains the stage"
        )
