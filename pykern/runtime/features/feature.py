"""What a pipeline does beside the actions of its steps, in one part for each of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from ...plan import Kind, Plan
from ...tensors.trees import Call
from ..batch import Batch, Outputs
from ..driver import Program
from ..executor import Executor
from ..stage.stage import Run, Stage

_T = TypeVar("_T")
# What all processes have to have alike, by what it is.
Told = Callable[[], Mapping[str, str]]


class Runner(Protocol):
    """Runs steps and forwards: an executor, or what takes its place."""

    def run(self, program: Program, batch: Batch, result: Callable[[], Any]) -> Any:
        """As `Executor.run`."""

    def predict(self, program: Program, batch: Batch, outputs: Outputs) -> Any:
        """As `Executor.predict`."""


@dataclass
class Made:
    """A pipeline that is being made, for features to attach themselves to.

    Attributes:
        executor: runs its stages.
        plan: of its training steps.
        told: of it, to other processes.
        runner: what steps are run by; a feature may take the place of the one before.
    """

    executor: Executor
    plan: Plan
    told: Told
    runner: Runner


@dataclass
class TrainingStep:
    """A training step that is about to run, for features to change.

    Attributes:
        batch: its inputs and targets, where they are used.
        rows: of each microbatch.
        scaler: as the caller gave it.
        total: the rows by which losses count.
        scale: what gradients are multiplied by; None for nothing.
        checked: whether losses must be finite.
    """

    batch: tuple[Call, Any]
    rows: Sequence[int]
    scaler: object
    total: int
    scale: Tensor | None = None
    checked: bool = False


class Feature:
    """One thing that a pipeline does beside the actions of its steps.

    A feature inherits from this, and overrides what it has to do something for. Features have an
    order (`FEATURES` in `pipeline/build.py`), in which all of these are called but `finish` and
    `close`, which are called in reverse.
    """

    def place(self, model: nn.Module, device_type: str, told: Told) -> None:
        """Changes layers that are on their devices, before stages are made of them."""

    def attach(self, made: Made) -> None:
        """Begins to take part; whatever was done before is undone by `close`."""
        made.executor.watch(self.around)

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """What to call for an action instead: `call` itself where there is nothing to do."""
        del kind, stage
        return call

    def ready(self) -> None:
        """Raises where a forward alone cannot run."""

    def step(self, scaler: object) -> AbstractContextManager[None]:
        """Around all of a training step, whose exceptions it sees; later features are within."""
        del scaler
        return nullcontext()

    def begin(self, step: TrainingStep) -> None:
        """The step has been checked and is about to run."""

    def finish(self, loss: Tensor) -> Tensor:
        """The loss of a step whose actions have all run, from what it was so far: []."""
        return loss

    def close(self) -> None:
        """Gives back what was taken, which may be nothing yet. May be called twice."""


class Features:
    """The features that are in force, each asked only for what it has to do something for."""

    def __init__(self, parts: Sequence[Feature]) -> None:
        self._parts = parts
        self._ready, self._steps, self._begin, self._finish = (
            [part for part in parts if getattr(type(part), name) is not getattr(Feature, name)]
            for name in ("ready", "step", "begin", "finish")
        )

    def find(self, kind: type[_T]) -> _T | None:
        """The feature of this type; None where that is not in force."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._parts)

    def ready(self) -> None:
        """See `Feature`."""
        for part in self._ready:
            part.ready()

    def within(self, scaler: object, call: Callable[[], _T]) -> _T:
        """Calls it within the contexts of all features."""
        for part in reversed(self._steps):
            call = partial(_within, part, scaler, call)
        return call()

    def begin(self, step: TrainingStep) -> None:
        """See `Feature`."""
        for part in self._begin:
            part.begin(step)

    def finish(self, total: Callable[[], Tensor]) -> Tensor:
        """The loss of a step, from that of this process's batch."""
        loss = total()
        for part in reversed(self._finish):
            loss = part.finish(loss)
        return loss

    def close(self) -> None:
        """See `Feature`."""
        for part in reversed(self._parts):
            part.close()


def _within(part: Feature, scaler: object, call: Callable[[], _T]) -> _T:
    with part.step(scaler):
        return call()
