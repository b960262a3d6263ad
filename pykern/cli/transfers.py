"""Transfers between devices on the command line: a latency, or the links of a box."""

from typing import TYPE_CHECKING, NamedTuple

from ..plan import Costs, Plan
from ..plan.costs import changed
from .values import ShareCosts

if TYPE_CHECKING:
    from ..boxes import Box

MIB = 2**20


class Transfers(NamedTuple):
    """The time of transfers.

    Attributes:
        latency_ms: The time of --transfer; None if it is not given.
        box: The box whose links they take; None for the latency alone.
        message_mib: With a box: what a microbatch sends from one stage to the next.
    """

    latency_ms: float | None
    box: "Box | None" = None
    message_mib: float = 0.0

    @property
    def num_devices(self) -> int | None:
        """The number of devices of the box, if there is one."""
        return None if self.box is None else len(self.box.devices)

    def of(self, costs: ShareCosts, plan: Plan) -> Costs:
        """The costs of each action of the plan, and of its transfers."""
        return self.over_box(costs.of(plan, self.latency_ms or 0.0), plan)

    def over_box(self, costs: Costs, plan: Plan) -> Costs:
        """The costs with transfers over the links of the box, if there is one."""
        from ..boxes import over_links

        if self.box is None:
            return costs
        return over_links(costs, plan, self.box, self.message_mib * MIB / plan.num_slices)

    def at_worst(self, costs: ShareCosts) -> Costs:
        """The costs of a share, every transfer over the slowest link: a search tries placements."""
        from ..boxes import slowest

        share = costs.of_share(self.latency_ms or 0.0)
        link = None if self.box is None else slowest(self.box)
        if link is None:
            return share
        return changed(
            share,
            transfer_ns=link.latency_ns,
            message_bytes=self.message_mib * MIB,
            bandwidth=link.bytes_per_ns,
        )

    def in_words(self, drawn: list[Costs]) -> list[str]:
        """A line about the transfers over the box in the costs of plans, if there is one."""
        if self.box is None:
            return []
        times_ns = sorted(time_ns for costs in drawn for time_ns in _times_ns(costs))
        if not times_ns:
            return []
        ends = dict.fromkeys(f"{time_ns / 1e6:.3g}" for time_ns in (times_ns[0], times_ns[-1]))
        return [
            f"a microbatch's {self.message_mib:g} MiB take {' to '.join(ends)} ms over the links "
            f"of {self.box.name} ({self.box.basis})"
        ]


def _times_ns(costs: Costs) -> list[float]:
    """The times of transfers in costs of `over_links`, which has 0 for a boundary in a device."""
    messages = costs.message_bytes
    assert isinstance(messages, list)
    return [costs.transfer_ns + message_ns for message_ns in messages if message_ns]


def transfers_of(latency_ms: float | None, box: str | None, message_mib: float | None) -> Transfers:
    """The transfers by --transfer, or by --box and --message.

    Raises:
        OSError: The box cannot be read.
        ValueError: The box is not a profile, or the options do not go together.
    """
    from ..boxes import load

    if (box is None) != (message_mib is None):
        alone = "--box" if message_mib is None else "--message"
        raise ValueError(
            f"--box and --message must be given together, got {alone} alone. Say which box it is, "
            "and the MiB that a microbatch sends from one stage to the next"
        )
    if box is None or message_mib is None:
        return Transfers(latency_ms)
    if latency_ms is not None:
        raise ValueError(
            f"--transfer must not go with --box, whose links have latencies, got {latency_ms:g}. "
            "Omit it"
        )
    return Transfers(None, load(box), message_mib)
