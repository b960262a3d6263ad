"""Features: the parts of a pipeline's work beside the actions of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
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
# Values that must be the same in all processes, each with its description as the key.
Told = Callable[[], Mapping[str, str]]


class Runner(Protocol):
    """Runs steps and forwards: an executor, or its replacement."""

    def run(self, program: Program, batch: Batch, result: Callable[[], Any]) -> Any:
        """Runs a step, as `Executor.run`."""

    def predict(self, program: Program, batch: Batch, outputs: Outputs) -> Any:
        """Runs a forward, as `Executor.predict`."""


@dataclass
class Made:
    """A pipeline that is being made, for features to attach themselves to.

    Attributes:
        executor: runs its stages.
        plan: of its training steps.
        told: values of the pipeline that other processes check.
        runner: runs steps; a feature may replace it.
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
        total: the number of rows by which losses are weighted.
        scale: the factor of gradients; None for 1.
        checked: whether losses must be finite.
    """

    batch: tuple[Call, Any]
    rows: Sequence[int]
    scaler: object
    total: int
    scale: Tensor | None = None
    checked: bool = False


class Feature:
    """A part of a pipeline's work beside the actions of its steps.

    A feature inherits from this class, and overrides the methods that it needs. Features have an
    order (`FEATURES` in `pipeline/build.py`), in which all methods are called but `finish` and
    `close`, which are called in reverse.
    """

    def place(self, model: nn.Module, device_type: str, told: Told) -> None:
        """Changes layers on their devices, before stages are made from the layers."""

    def attach(self, made: Made) -> None:
        """Attaches the feature to the pipeline; `close` undoes it, whatever was done until then."""
        made.executor.watch(self.around)

    def around(self, kind: Kind, stage: Stage, call: Run) -> Run:
        """The call for an action: a wrapper of `call`, or `call` itself for no change."""
        del kind, stage
        return call

    def ready(self) -> None:
        """Raises where a forward alone cannot run."""

    def step(self, scaler: object) -> AbstractContextManager[None] | None:
        """A context around a training step, if any; sees errors, and contains later features."""
        del scaler
        return None

    def begin(self, step: TrainingStep) -> None:
        """Changes a step that has been checked and is about to run."""

    def finish(self, loss: Tensor) -> Tensor:
        """The new loss of a step whose actions have all run, from its loss so far: []."""
        return loss

    def close(self) -> None:
        """Releases the resources that the feature has taken so far. May be called twice."""


class Features:
    """The features in force. Each is called only for the methods that it overrides."""

    def __init__(self, parts: Sequence[Feature]) -> None:
        self._parts = parts
        self._ready, self._steps, self._begin, self._finish = (
            [part for part in parts if getattr(type(part), name) is not getattr(Feature, name)]
            for name in ("ready", "step", "begin", "finish")
        )

    def find(self, kind: type[_T]) -> _T | None:
        """The feature of this type; None if it is not in force."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def __iter__(self) -> Iterator[Feature]:
        return iter(self._parts)

    def ready(self) -> None:
        """See `Feature`."""
        for part in self._ready:
            part.ready()

    def within(self, scaler: object, call: Callable[[], _T]) -> _T:
        """Calls `call` within the contexts of all features."""
        for part in reversed(self._steps):
            call = partial(_within, part, scaler, call)
        return call()

    def begin(self, step: TrainingStep) -> None:
        """See `Feature`."""
        for part in self._begin:
            part.begin(step)

    def finish(self, total: Callable[[], Tensor]) -> Tensor:
        """The loss of a step, from the loss of this process's batch."""
        loss = total()
        for part in reversed(self._finish):
            loss = part.finish(loss)
        return loss

    def close(self) -> None:
        """See `Feature`."""
        for part in reversed(self._parts):
            part.close()


def _within(part: Feature, scaler: object, call: Callable[[], _T]) -> _T:
    context = part.step(scaler)
    if context is None:
        return call()
    with context:
        return call()
