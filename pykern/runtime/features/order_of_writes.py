"""Refuses buffers that layers write in another order than in the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from ...plan import Kind
from ..recompute.buffers import BufferVersions, Names, modules_in, names_in
from ..stage.stage import Run, Stage
from .feature import Feature


class OrderOfWrites(Feature):
    """Refuses writes to buffers, such as running statistics, that have another order in a plan.

    A layer within `torch.utils.checkpoint` runs again in its backward, and writes to its buffers
    once more. In the plain model this second write comes before the next forward. In a stage, the
    second write may come after several forwards. Replicas write in no order at all.

    Args:
        in_replicas: whether the plan has several replicas.
    """

    def __init__(self, *, in_replicas: bool) -> None:
        self._in_replicas = in_replicas
        # By stage, the microbatch of the last F, and the buffers that forwards have written. Those
        # that backwards alone write, such as averages of gradients, have the order of backwards.
        self._last: dict[int, int] = {}
        self._written: dict[int, set[tuple[int, str]]] = {}

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """The replacement for the call of an action; `call` itself without buffers."""
        modules = modules_in(stage.originals)
        names = names_in(modules)
        if kind is Kind.F and names:
            return partial(self._forward, stage, call, modules, names)
        if kind in (Kind.B, Kind.I, Kind.W) and names:
            return partial(self._backward, stage, call, modules, names)
        return call

    def _forward(
        self,
        stage: Stage,
        call: Run,
        modules: Sequence[nn.Module],
        names: Names,
        microbatch: int,
    ) -> None:
        self._last[stage.index] = microbatch
        before = BufferVersions(modules, names)
        call(microbatch)
        written = before.written()
        self._written.setdefault(stage.index, set()).update(written)
        if written and self._in_replicas:
            raise RuntimeError(
                f"stage {stage.index} writes to {_named(stage, modules, written)} in a forward, "
                "which replicas would do in no fixed order. Use a schedule and a pipeline without "
                "replicas"
            )

    def _backward(
        self,
        stage: Stage,
        call: Run,
        modules: Sequence[nn.Module],
        names: Names,
        microbatch: int,
    ) -> None:
        if self._last.get(stage.index) == microbatch:
            call(microbatch)
            return
        before = BufferVersions(modules, names)
        call(microbatch)
        by_forwards = self._written.get(stage.index, ())
        if written := [name for name in before.written() if name in by_forwards]:
            raise RuntimeError(
                f"stage {stage.index} writes to {_named(stage, modules, written)} again in a "
                "backward, as torch.utils.checkpoint does, after the forwards of later "
                "microbatches. Its values would differ from those of the model run microbatch by "
                'microbatch. Use recompute="layer" instead of the checkpoint, or, for a batch '
                "norm, deferred_batch_norm=True"
            )


def _named(stage: Stage, modules: Sequence[nn.Module], written: Names) -> str:
    """The first of some buffers, for a message."""
    number, name = written[0]
    for place, layer in enumerate(stage.originals):
        for path, module in layer.named_modules():
            if module is modules[number]:
                full = f"{path}.{name}" if path else name
                return f"the buffer {full!r} of its layer {place}"
    return f"the buffer {name!r}"
