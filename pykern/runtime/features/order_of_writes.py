"""Refuses buffers that layers write in another order than in the plain model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain
from weakref import WeakMethod

from torch import nn

from ...plan import Kind
from ..recompute.buffers import Buffers, BufferVersions, Names, modules_in, name_in, names_in
from ..stage.settings import Settings
from ..stage.stage import Run, Stage
from .feature import Feature, Made


class WrittenInReplicas(RuntimeError):
    """A forward writes to a buffer, which replicas would do in no fixed order."""


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
        # By stage, its modules with all of their buffers, and a look at those of its own, if any.
        self._found: dict[Stage, tuple[Sequence[nn.Module], Names]] = {}
        self._writes: dict[Stage, _Writes] = {}

    def attach(self, made: Made) -> None:
        """Wraps the actions of stages that have buffers of their own, now or later."""
        # Stages have this feature. The executor stays out of the circle, since it has to go with
        # its last reference.
        self._stages, self._of_replicas = made.executor.stages, made.executor.replicas.stages
        self._watch = WeakMethod(made.executor.watch)
        self._find()
        for stage in self._of_replicas:
            stage.when_changed.append(partial(self._follow, stage))
        super().attach(made)

    def _find(self) -> None:
        uses = Counter(chain.from_iterable(modules_in(of.originals) for of in self._stages))
        for stage in self._of_replicas:
            modules, all_names = self._found[stage] = _buffers_of(stage)
            # Ties refuse writes to the buffers of several stages, which this stage may see at any
            # time.
            names = [name for name in all_names if uses[modules[name[0]]] == 1]
            if stage in self._writes:
                self._writes[stage].look_at(modules, names)
            elif names:
                self._writes[stage] = _Writes(stage, modules, names, self._in_replicas)

    def _follow(self, stage: Stage, _: Settings) -> None:
        """Looks at buffers that a stage has got since the last look, before its step."""
        if _buffers_of(stage) == self._found[stage]:
            return
        known = set(self._writes)
        self._find()
        new = self._writes.keys() - known
        watch = self._watch()
        if new and watch is not None:
            watch(lambda kind, of, call: self.around(kind, of, call) if of in new else call)

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """The replacement for the call of an action; `call` itself without buffers."""
        writes = self._writes.get(stage)
        if writes is not None and kind is Kind.F:
            return partial(writes.forward, call)
        if writes is not None and kind in (Kind.B, Kind.I, Kind.W):
            return partial(writes.backward, call)
        return call


class _Writes:
    """The writes to the buffers of one stage."""

    def __init__(
        self, stage: Stage, modules: Sequence[nn.Module], names: Names, in_replicas: bool
    ) -> None:
        self._stage = stage
        self._in_replicas = in_replicas
        self.look_at(modules, names)

    def look_at(self, modules: Sequence[nn.Module], names: Names) -> None:
        """Looks at these buffers from now on."""
        self._modules = modules
        self._names = names
        self._seen = BufferVersions(modules, names)
        # The settings of the stage under which the values of buffers have been compared.
        self._compared_for: Settings | None = None
        # The microbatch of the last F, and the buffers that forwards have written. Those that
        # backwards alone write, such as averages of gradients, have the order of backwards.
        self._last = -1
        self._by_forwards: set[tuple[int, str]] = set()

    def forward(self, call: Run, microbatch: int) -> None:
        """Runs an F, and notes the buffers that it writes."""
        self._last = microbatch
        if self._in_replicas and self._compared_for is not self._stage.settings:
            written = self._changed(call, microbatch)
        else:
            written = self._written(call, microbatch)
        if written and self._in_replicas:
            raise WrittenInReplicas(
                f"stage {self._stage.index} writes to {self._named(written)} in a forward, which "
                "replicas would do in no fixed order. Use a schedule and a pipeline without "
                "replicas"
            )
        self._by_forwards.update(written)

    def backward(self, call: Run, microbatch: int) -> None:
        """Runs a B, I or W, and refuses its writes to buffers that later forwards have written."""
        if microbatch == self._last or not self._by_forwards:
            call(microbatch)
            return
        written = self._written(call, microbatch)
        if again := [name for name in written if name in self._by_forwards]:
            raise RuntimeError(
                f"stage {self._stage.index} writes to {self._named(again)} again in a backward, "
                "as torch.utils.checkpoint does, after the forwards of later microbatches. Its "
                "values would differ from those of the model run microbatch by microbatch. Use "
                'recompute="layer" instead of the checkpoint, or, for a batch norm, '
                "deferred_batch_norm=True"
            )

    def _changed(self, call: Run, microbatch: int) -> Names:
        """The buffers that a call writes, by their values, since writes to `.data` do not count."""
        before = Buffers(self._modules, self._names)
        call(microbatch)
        changed = before.changed()
        if not changed:
            self._compared_for = self._stage.settings
        return changed

    def _written(self, call: Run, microbatch: int) -> Names:
        """The buffers that a call writes."""
        if self._seen.written():
            self._seen = BufferVersions(self._modules, self._names)
        call(microbatch)
        return self._seen.written()

    def _named(self, written: Names) -> str:
        """The first of some buffers, for a message."""
        number, name = written[0]
        return f"the buffer {name_in(self._stage.originals, self._modules[number], name)}"


def _buffers_of(stage: Stage) -> tuple[Sequence[nn.Module], Names]:
    """The modules of a stage, and all of their buffers."""
    modules = modules_in(stage.originals)
    return modules, names_in(modules)
