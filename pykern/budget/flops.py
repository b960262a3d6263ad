"""The operations of floating point that a microbatch takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..runtime.stage.stage import Finish, Stage
from ..tensors.flops import CountedFlops
from .measure import StageTrials


def microbatch_flops(stages: Sequence[Stage], arguments: tuple[Any, ...], finish: Finish) -> int:
    """Counts the products and attentions of a forward and backward without recompute.

    Args:
        stages: all stages of one replica, on their devices.
        arguments: arguments of the first layer, for one microbatch.
        finish: as of a step; called with microbatch 0.
    """
    counted = CountedFlops()
    trials = StageTrials(stages, arguments, finish, split=False, timed=False)
    with trials.tried("none") as chain, counted:
        chain.run("none", finish)
    return counted.total
