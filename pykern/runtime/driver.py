"""What an executor and the drivers that run its actions say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from .. import _C
from ..plan import Action, Kind, Plan, Timeline
from ..trace.routes import Direct
from .batch import Batch
from .host_memory import HostLink
from .stage.stage import Stage

# A plan that is ready to run: on CPU workers, on GPUs.
Program = _C.WorkerProgram | _C.StreamProgram
Callbacks = Mapping[Kind, Sequence[Callable[[int], None]]]
# The action that raised, or None, its device, or one below 0 for an interrupt, and the exception.
Failure = tuple[Action | None, int, BaseException]
# Gives what an action was in its batch, and which batch that was if it was not the only one.
Located = Callable[[Action], tuple[Action, str]]


class Driver(Protocol):
    """Runs programs on the devices of a plan: CPU workers, or the streams of GPUs."""

    @property
    def claim(self) -> AbstractContextManager[object]:
        """Held while stages run; entering raises RuntimeError where that cannot be."""

    @property
    def captures(self) -> bool:
        """Whether steps may be replayed without Python."""

    def direct(self, plan: Plan, /) -> Direct:
        """Where a value can go from a stage to a later one past those between."""

    def connect(self, replicas: Sequence[Sequence[Stage]], plan: Plan) -> None:
        """Lets stages reach their neighbours."""

    def host_link(self, device: int, /) -> HostLink:
        """How tensors of a device of the plan get to the host and back."""

    def device(self, lane: int, /) -> torch.device:
        """Where a device of the plan has its tensors."""

    def program(self, plan: Plan) -> Program:
        """The plan, ready to run by this driver."""

    def halves(self, plan: Plan) -> tuple[Program, Program]:
        """The forwards of a plan, and a program of its other actions, which runs behind them."""

    def run(
        self, program: Program, callbacks: Callbacks, batch: Batch, *, traced: bool
    ) -> list[Failure]:
        """Runs a step for whoever has the claim; returns what failed, first things first."""

    def end(self) -> None:
        """Lets go of everything that belongs to the step."""

    def timeline(self, program: Program, ago: int) -> Timeline:
        """What ran when, `ago` steps before the last one."""

    def where(self, device: int) -> str:
        """What a device is called in a message."""

    def close(self) -> None:
        """Ends what runs actions, after a step in progress."""
