"""The things that all pipelines of a rehearsal share."""

from __future__ import annotations

from dataclasses import dataclass

from ..boxes import Box
from .host_waits import HostWaits
from .on_cpu import OnCpu
from .optimizers import MadeOptimizers


@dataclass(frozen=True)
class Setting:
    """The box of a rehearsal, and what sees the script.

    Attributes:
        box: the box.
        num_steps: the steps of a pipeline after which the script ends.
        waits: where the host waits.
        mode: has the CPU compute.
        optimizers: that the script makes.
    """

    box: Box
    num_steps: int
    waits: HostWaits
    mode: OnCpu
    optimizers: MadeOptimizers
