"""Costs on a box, from units that were measured on devices like its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..boxes import Box, over_links, slowest
from ..plan import Costs, Plan
from ..plan.costs import changed
from ..tensors.parameters import bytes_of, gradient_bytes, held_by
from .asked import Asked
from .measurements import Measurements
from .site import memory_rate

# A sum reads two numbers and writes one.
_MOVED = 3


@dataclass(frozen=True)
class BoxCosts(Measurements):
    """Measurements of units, for devices that do not slow each other down, over links of a box.

    Attributes:
        box: the box.
        copied_ns: the time to copy all parameters to a further replica, by one link after another.
    """

    box: Box
    copied_ns: float

    def costs(self, spans: Sequence[range], rows: float) -> Costs:
        """The costs of stages of these units, each hand-over by the slowest link."""
        link = slowest(self.box)
        assert link is not None
        return changed(
            super().costs(spans, rows),
            transfer_ns=link.latency_ns,
            message_bytes=self._handed(spans, rows),
            bandwidth=link.bytes_per_ns,
        )

    def costs_of(self, plan: Plan, spans: Sequence[range], rows: float) -> Costs:
        """The costs of a plan, each hand-over by the link of its devices."""
        costs = super().costs_of(plan, spans, rows)
        return over_links(costs, plan, self.box, self._handed(spans, rows))

    def outside_ns(self, num_actions: int, replicas: int) -> float:
        """The time of a step before its first action and behind its last, in nanoseconds.

        Stages copy their parameters to a replica at the same time, each by a link of its own.
        """
        copied_ns = (replicas - 1) * self.copied_ns * replicas / len(self.box.devices)
        return super().outside_ns(num_actions, replicas) + copied_ns

    def _handed(self, spans: Sequence[range], rows: float) -> list[float]:
        handed = self.bytes_of("handed", rows)
        return [handed[span.stop - 1] for span in spans]


def box_costs(asked: Asked, measured: Measurements, box: Box) -> BoxCosts:
    """The costs on a box.

    One device at hand shows no sum over replicas. Its time is then that of the gradients over the
    slowest link and through the memory.
    """
    link = slowest(box)
    assert link is not None
    reduce_ns, copied_ns = measured.reduce_ns, 0.0
    if measured.cores == 1:
        per_byte = 1 / link.bytes_per_ns + _MOVED / memory_rate(box)
        held = [held_by(layers) for layers in asked.units.modules()]
        reduce_ns = tuple(gradient_bytes(trained) * per_byte for _, _, trained in held)
        copied_ns = sum(bytes_of(parameters) for parameters, _, _ in held) / link.bytes_per_ns
    alike = {
        "cores": len(box.devices),
        "speeds": ((1.0,) * len(box.devices),) * len(measured.rows),
        "crowded_ns": 0.0,
        "reduce_ns": reduce_ns,
    }
    return BoxCosts(**(vars(measured) | alike), box=box, copied_ns=copied_ns)
