"""Finds the cells that a device has to recompute so that it never holds more than it may."""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import Action, Kind
from .level_costs import BACKWARD, StageCosts


class Sweep:
    """Goes along a device's row and gives up keeping a cell whenever too much is held."""

    def __init__(
        self,
        row: Sequence[Action],
        stages: Sequence[StageCosts],
        kept: str,
        rebuilt: str | None,
        gaps: dict[tuple[int, int], float],
    ) -> None:
        self.recomputed: set[tuple[int, int]] = set()
        self._row = row
        on_row = {action.stage for action in row}
        self._kept = {s: stages[s].kept[kept] for s in on_row}
        self._rebuilt = {s: stages[s].rebuilt[rebuilt] for s in on_row} if rebuilt else {}
        self._gaps = gaps
        self._ends = {
            (action.stage, action.microbatch): position
            for position, action in enumerate(row)
            if action.kind in BACKWARD
        }
        # (stage, microbatch) of the activations that are kept whole at this point of the row.
        self._alive: set[tuple[int, int]] = set()
        self._held = 0.0

    def price(self, cell: tuple[int, int]) -> float:
        """The additional busy time of the device if it recomputes the cell."""
        rebuilt = self._rebuilt[cell[0]]
        return max(rebuilt.recompute_ns - self._gaps[cell], 0.0) + rebuilt.backward_ns

    def take(self, position: int, cap: float) -> bool:
        """Runs the action there; False if it cannot be within the cap."""
        action = self._row[position]
        cell = action.stage, action.microbatch
        cost = self._kept[action.stage]
        if action.kind is Kind.F:
            self._held += cost.activation_bytes
            self._alive.add(cell)
        elif action.kind in BACKWARD:
            graph = cost.activation_bytes
            if cell in self.recomputed:
                graph = self._rebuilt[action.stage].activation_bytes
                self._held += graph - self._rebuilt[action.stage].boundary_bytes
            self._alive.discard(cell)
            fits = self._give_up(position, cap)
            self._held += (cost.weights_bytes if action.kind is Kind.I else 0.0) - graph
            return fits
        elif action.kind is Kind.W:
            self._held -= cost.weights_bytes
        return self._give_up(position, cap)

    def _give_up(self, position: int, cap: float) -> bool:
        while self._held > cap:
            # One whose backward is next would be there again at once.
            candidates = [
                cell
                for cell in self._alive
                if cell[0] in self._rebuilt
                and self._ends[cell] > position + 1
                and self._saving(cell) > 0
            ]
            if not candidates:
                return False
            chosen = min(candidates, key=lambda cell: (self.price(cell), -self._ends[cell]))
            self._alive.remove(chosen)
            self.recomputed.add(chosen)
            self._held -= self._saving(chosen)
        return True

    def _saving(self, cell: tuple[int, int]) -> float:
        return self._kept[cell[0]].activation_bytes - self._rebuilt[cell[0]].boundary_bytes
