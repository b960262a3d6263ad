"""Looks for NaN or infinite values, and reports the place of the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import Tensor

from ...plan import Kind
from ...tensors.finite import require_finite
from ...tensors.trees import with_paths
from ...trace import Segment
from ..recompute.cell import Calls
from ..stage.stage import Run, Stage
from .feature import Feature, TrainingStep

# The values to check: nothing, losses, also gradients, also inputs and outputs of layers.
CheckFinite = Literal["off", "loss", "grads", "activations"]


class Checks(Feature):
    """Looks at gradients, and at outputs of layers, as the actions of a step make them.

    Args:
        level: the values to check.
        names: of all layers.
        spans: by stage, the range of its layers.
    """

    def __init__(self, level: CheckFinite, names: Sequence[str], spans: Sequence[range]) -> None:
        self._level = level
        self._names = [names[span.start : span.stop] for span in spans]

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """The call for an action: `call` itself, or for a backward `call` and then a check."""
        if kind is Kind.F and self._level == "activations":
            stage.look = partial(self._looking, stage)
        if kind in (Kind.B, Kind.W) and self._level in ("grads", "activations"):
            return partial(self._backward, stage, call)
        return call

    def begin(self, step: TrainingStep) -> None:
        """Has `Losses` check the losses."""
        step.checked = True

    def _looking(self, stage: Stage, microbatch: int, calls: Calls) -> Calls:
        """The calls of a stage, with a check of the layers' outputs."""
        *layers, end = calls
        names = self._names[stage.index]
        where = f"stage {stage.index}, microbatch {microbatch}"
        looking = [
            partial(self._call, f"the output of layer {name!r}", where, call)
            for name, call in zip(names, layers, strict=True)
        ]
        if stage.previous is None:
            looking[0] = partial(self._first, where, looking[0])
        return [*looking, end]

    def _first(self, where: str, call: Callable[..., Any], *arguments: Any) -> Any:
        _require_finite_in(arguments, "the batch", where)
        return call(*arguments)

    def _call(self, name: str, where: str, call: Callable[..., Any], *arguments: Any) -> Any:
        value = call(*arguments)
        _require_finite_in(value, name, where)
        return value

    def _backward(self, stage: Stage, call: Run, microbatch: int) -> None:
        call(microbatch)
        # A scaler checks by itself, and skips the step.
        if getattr(stage.finish, "scale", None) is not None:
            return
        where = f"stage {stage.index}, microbatch {microbatch}"
        for name, layer in zip(self._names[stage.index], stage.layers, strict=True):
            for key, parameter in layer.named_parameters():
                if parameter.grad is not None:
                    # Parameters of a recorded model's segment have names of the whole model.
                    is_segment = isinstance(layer, Segment)
                    full = key.replace("/", ".") if is_segment else f"{name}.{key}"
                    require_finite(parameter.grad, f"the gradient of {full!r}", where)


def _require_finite_in(value: Any, what: str, where: str) -> None:
    for path, leaf in with_paths(value):
        if isinstance(leaf, Tensor):
            require_finite(leaf, what + path, where, may_mask=not leaf.requires_grad)
