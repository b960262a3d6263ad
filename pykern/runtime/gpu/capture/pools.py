"""Memory pools: some graphs of a stage share memory."""

from __future__ import annotations

from typing import Any

from ....plan import Kind, Plan
from ..cuda import Gpus


class Pools:
    """The memory for the graphs of a stage.

    A slot has its own memory for tensors that last from F to backward. Recomputed tensors last from
    R to the end of the backward. One memory for all slots is enough for these, if no other R of the
    stage comes in between.
    """

    def __init__(self, gpus: Gpus, plan: Plan, stage: int) -> None:
        self._gpus = gpus
        self._of_slots: dict[int, Any] = {}
        self._shared = gpus.pool() if takes_turns(plan, stage) else None

    @property
    def are_shared(self) -> bool:
        """Whether recomputed tensors of all slots are in one memory."""
        return self._shared is not None

    def of(self, slot: int) -> Any:
        """The pool for F, and for the backward of microbatches that are not recomputed."""
        if slot not in self._of_slots:
            self._of_slots[slot] = self._gpus.pool()
        return self._of_slots[slot]

    def of_recompute(self, slot: int) -> Any:
        """The pool for R and the backward after it."""
        return self.of(slot) if self._shared is None else self._shared


def takes_turns(plan: Plan, stage: int) -> bool:
    """Whether the tensors of an R are always freed before the stage's next R."""
    there: int | None = None
    for action in (action for row in plan.rows for action in row if action.stage == stage):
        if action.kind is Kind.R:
            if there is not None:
                return False
            there = action.microbatch
        elif action.kind in (Kind.B, Kind.W) and action.microbatch == there:
            there = None
    return True
