"""Which graphs of a stage use the same memory."""

from __future__ import annotations

from typing import Any

from ....plan import Kind, Plan
from ..cuda import Gpus


class Pools:
    """The memory for the graphs of a stage.

    A slot has memory of its own for what lasts from F to backward. What is recomputed lasts from R
    to the end of the backward: where no other R comes between, in all slots, one memory is enough.
    """

    def __init__(self, gpus: Gpus, plan: Plan, stage: int) -> None:
        self._gpus = gpus
        self._of_slots: dict[int, Any] = {}
        self._shared = gpus.pool() if takes_turns(plan, stage) else None

    def of(self, slot: int) -> Any:
        """For F, and for the backward of what is not recomputed."""
        if slot not in self._of_slots:
            self._of_slots[slot] = self._gpus.pool()
        return self._of_slots[slot]

    def of_recompute(self, slot: int) -> Any:
        """For R and the backward behind it."""
        return self.of(slot) if self._shared is None else self._shared


def takes_turns(plan: Plan, stage: int) -> bool:
    """Whether what an R of the stage has made is always gone before its next R."""
    there: int | None = None
    for action in (action for row in plan.rows for action in row if action.stage == stage):
        if action.kind is Kind.R:
            if there is not None:
                return False
            there = action.microbatch
        elif action.kind in (Kind.B, Kind.W) and action.microbatch == there:
            there = None
    return True
