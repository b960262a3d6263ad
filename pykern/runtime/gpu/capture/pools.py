"""Memory pools: some graphs of a stage share memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ....plan import Kind, Plan
from ..cuda import Gpus
from .refusals import CannotCapture

_MIB = 2**20


class Pools:
    """The memory for the graphs of a stage.

    A slot has its own memory for tensors that last from F to backward. Recomputed tensors last from
    R to the end of the backward. One memory for all slots is enough for these, if no other R of the
    stage comes in between.
    """

    def __init__(self, gpus: Gpus, plan: Plan, stage: int) -> None:
        self._gpus, self._stage = gpus, stage
        self._of_slots: dict[int, Any] = {}
        self._shared = gpus.pool() if takes_turns(plan, stage) else None

    @property
    def are_shared(self) -> bool:
        """Whether recomputed tensors of all slots are in one memory."""
        return self._shared is not None

    def slots(self, lane: int, count: int) -> Iterator[int]:
        """The numbers of the slots, whose graphs take as much memory each.

        Raises:
            CannotCapture: after the first slot, if the GPU has too little memory for all.
        """
        before, _ = self._gpus.room(lane)
        for slot in range(count):
            yield slot
            if slot == 0:
                reserved, free = self._gpus.room(lane)
                each, more = reserved - before, count - 1
                if each * more > free:
                    raise CannotCapture(
                        f"graphs of stage {self._stage} need {each // _MIB} MiB for each of "
                        f"{more} more microbatches in flight, and {free // _MIB} MiB are free. "
                        "Recompute, or use a schedule with fewer in flight"
                    )

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
