"""The interface between an executor and the drivers that run its actions."""

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

# A plan that is ready to run, on CPU workers or on GPUs.
Program = _C.WorkerProgram | _C.StreamProgram
Callbacks = Mapping[Kind, Sequence[Callable[[int], None]]]
# The action that raised (or None), its device (below 0 for an interrupt), and the exception.
Failure = tuple[Action | None, int, BaseException]
# Returns the action numbered within its batch, and the batch's name ("" if not needed).
Located = Callable[[Action], tuple[Action, str]]


class Driver(Protocol):
    """Runs programs on the devices of a plan: CPU workers, or the streams of GPUs."""

    def claim(self) -> AbstractContextManager[object]:
        """Takes the driver until the end of the context; RuntimeError if stages cannot run."""

    @property
    def captures(self) -> bool:
        """Whether steps may be replayed without Python."""

    def ready(self) -> None:
        """Raises PipelineStalled if a step has stalled on the devices."""

    def direct(self, plan: Plan, /) -> Direct:
        """A function that tells whether values can go past the stages between two stages."""

    def connect(self, replicas: Sequence[Sequence[Stage]], plan: Plan) -> None:
        """Connects stages with their neighbours."""

    def host_link(self, device: int, /) -> HostLink:
        """The link that copies tensors of a device of the plan to the host and back."""

    def device(self, lane: int, /) -> torch.device:
        """The torch device that holds the tensors of a device of the plan."""

    def transfer_bytes(self, lane: int, /) -> int:
        """The bytes in which a device of the plan receives what others send, as allocated."""

    def program(self, plan: Plan) -> Program:
        """The plan as a program of this driver."""

    def halves(self, plan: Plan) -> tuple[Program, Program]:
        """A program of the plan's forwards, and one of its other actions, to run after them."""

    def run(
        self, program: Program, callbacks: Callbacks, batch: Batch, *, traced: bool
    ) -> list[Failure]:
        """Runs a step for the holder of the claim; returns the failures, earliest first."""

    def end(self) -> None:
        """Releases all objects of the step."""

    def timeline(self, program: Program, ago: int) -> Timeline:
        """The measured times of all actions, `ago` steps before the last one."""

    def where(self, device: int) -> str:
        """The name of a device for messages."""

    def close(self) -> None:
        """Ends the threads that run actions, after a step in progress."""
