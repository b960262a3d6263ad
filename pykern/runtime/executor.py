"""Runs plans over stages: one step in, its results out, or the first error that happened in it."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch

from .. import _C
from ..plan import Action, Kind
from .carry import CallerState
from .random import StepSeed
from .replica import Replica
from .stage import Finish, Stage

_open: weakref.WeakSet[Executor] = weakref.WeakSet()


# What CPU workers can run.
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.REDUCE)


class Executor:
    """The stages of a model with the threads that run them, one per device.

    A step ends in one of two ways: everything ran, or the first exception is raised, the same
    object that user code raised, with a note of where. Either way no worker runs user code any
    more, no tensor of the step is held, and the next step starts fresh.
    """

    def __init__(self, stages: Sequence[Stage], num_replicas: int, num_devices: int) -> None:
        self._replicas: list[Sequence[Stage]] = [stages]
        self._replicas += [
            [Replica(stage, stage.device) for stage in stages] for _ in range(1, num_replicas)
        ]
        for replica in self._replicas:
            for stage, following in pairwise(replica):
                stage.next, following.previous = following, stage
        self._stages = [stage for replica in self._replicas for stage in replica]
        self._callbacks: dict[Kind, list[Callable[[int], None]]] = {
            Kind.F: [stage.forward for stage in self._stages],
            Kind.B: [stage.backward for stage in self._stages],
            Kind.I: [stage.input_gradients for stage in self._stages],
            Kind.W: [stage.weight_gradients for stage in self._stages],
            Kind.REDUCE: [stage.reduce for stage in self._stages],
        }
        self._num_devices = num_devices
        self._workers = _C.Executor(num_devices)
        _open.add(self)

    def run(
        self,
        program: _C.Program,
        arguments: Sequence[tuple[Any, ...] | None],
        finish: Finish,
    ) -> None:
        """Runs one step.

        Args:
            program: a plan over these stages.
            arguments: what the first layer is called with, per microbatch; None skips a microbatch.
            finish: called in the last stage with each microbatch and its output; returns where
                backward starts.

        Raises:
            RuntimeError: the executor is closed, running, or from before a fork.
            BaseException: the first exception that a stage raised, unchanged but for a note.
        """
        caller = CallerState(self._num_devices)
        threads = torch.get_num_threads()
        with self._workers:
            try:
                self._begin(arguments, finish)
                failures = self._workers.run(program, self._callbacks, caller)
            finally:
                # A worker that takes its share of threads also changes a setting that MKL keeps per
                # process; this puts it back.
                if caller.changed_threads:
                    torch.set_num_threads(threads)
                for stage in self._stages:
                    stage.end()
            # An interrupt reaches workers between any two instructions, also while torch enters or
            # leaves a mode. What that left behind goes with the threads.
            if any(device < 0 for _, device, _ in failures):
                self._workers = _C.Executor(self._num_devices)
        if failures:
            raise _first(failures)

    def _begin(self, arguments: Sequence[tuple[Any, ...] | None], finish: Finish) -> None:
        seed = StepSeed()
        for stage in self._stages:
            stage.begin(len(arguments), seed, finish)
        for replica in self._replicas:
            replica[0].arguments = list(arguments)

    def close(self) -> None:
        """Ends the threads. A step in progress in another thread is stopped first."""
        self._workers.close()


def _first(failures: Sequence[tuple[Action | None, int, BaseException]]) -> BaseException:
    """The exception that happened first, with notes of where and of what happened after it."""
    (action, device, first), *later = failures
    # An exception that takes no notes (a frozen dataclass) or cannot be shown is raised as well.
    with suppress(Exception):
        if action is not None:
            first.add_note(f"pykern: raised in {_where(action, device)}")
        for action, device, exception in later:
            first.add_note(f"pykern: {_where(action, device)} failed as well: {exception!r}")
    return first


def _where(action: Action | None, device: int) -> str:
    if device < 0:
        return "a signal handler"
    if action is None:
        return f"the worker of device {device}, outside its actions"
    return f"stage {action.stage}, microbatch {action.microbatch}, action {action}, device {device}"


@atexit.register
def _close_all() -> None:
    # Threads that reach for the interpreter while it goes down would abort the process.
    for executor in list(_open):
        executor.close()
