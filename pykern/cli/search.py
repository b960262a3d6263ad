"""`pykern plan auto`: the search, and its report when it is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..plan import Plan
    from ..search.search import Found
    from .transfers import Transfers
    from .values import ShareCosts

AUTO = "auto"


class Search:
    """Makes the plan of the name "auto".

    Args:
        costs: Costs of a device's share of the model.
        transfers: The time of transfers; with a box, each over the slowest link.
        memory: Cap on memory, in units of 1F1B's peak, or None.
        budget_ms: Work of the search, in ms of one core, or None.
    """

    def __init__(
        self,
        costs: ShareCosts,
        transfers: Transfers,
        memory: float | None,
        budget_ms: float | None,
    ) -> None:
        self._costs, self._transfers = costs, transfers
        limits = {"memory": memory, "budget_ms": budget_ms}
        self.limits: dict[str, Any] = {k: v for k, v in limits.items() if v is not None}
        self.found: Found | None = None

    def __call__(self, num_devices: int, num_microbatches: int) -> Plan:
        """Search, and keep the result in `found`."""
        from ..search.search import auto

        costs = self._transfers.at_worst(self._costs)
        self.found = auto(num_devices, num_microbatches, costs=costs, **self.limits)
        return self.found.plan

    def report(self, *, is_drawn: bool) -> Iterator[str]:
        """The report of the search, if there was one.

        Args:
            is_drawn: Whether the plan is drawn as it was found.
        """
        if self.found is None:
            return
        if not is_drawn:
            yield "The search took all stages to train, and none to be recomputed:"
        yield str(self.found)

    def require_used(self, names: list[str], *, recomputes: bool) -> None:
        """Refuses limits without a search; a limit on memory is allowed with recompute too."""
        owners = {"memory": f"{AUTO} and --recompute", "budget_ms": AUTO}
        for option in self.limits:
            if AUTO not in names and not (option == "memory" and recomputes):
                flag = {"memory": "--memory", "budget_ms": "--budget"}[option]
                raise ValueError(f"{flag} must go with {owners[option]}, got {names[0]}. Omit it")
