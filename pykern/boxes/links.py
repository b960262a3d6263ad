"""The time that messages of a plan take over the links of a box."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from ..plan import Costs, Plan
from ..plan.costs import changed
from ..plan.counts import one_for_each
from .box import Box, BoxLink, known


def over_links(costs: Costs, plan: Plan, box: Box, message_bytes: float | Sequence[float]) -> Costs:
    """Costs whose transfers take the time of a box's links, latency included.

    Device n of the plan is device n of the box. A message has the link between its two devices
    alone: messages over one link follow each other, and other links do not slow it. A boundary
    has the slowest link of its replicas.

    Args:
        costs: Times of actions; other transfers than those of the box's links are left out.
        plan: The plan that is simulated with the costs.
        box: The box.
        message_bytes: Bytes that an F sends to the next stage, and a B or I back: one number, or a
            list with one for the boundary behind each stage.

    Returns:
        The costs for `pykern.plan.simulate`. Their messages are times: as many bytes as
        nanoseconds, because costs have one bandwidth for all boundaries.

    Raises:
        ValueError: The box has fewer devices than the plan, two neighbours have no link, or the
            list has another length.
    """
    box.require_devices(plan.num_devices)
    num_stages = plan.num_stages
    sizes = one_for_each("message_bytes", message_bytes, num_stages, "stages")
    boundaries = [_links(box, plan, stage) for stage in range(num_stages)]
    # Costs have one latency, which holds no link: the least. Longer ones hold their links longer.
    latency_ns = min((of.latency_ns for links in boundaries for of in links), default=0.0)
    times_ns = [
        max((_time_ns(of, size) - latency_ns for of in links), default=0.0)
        for links, size in zip(boundaries, sizes, strict=True)
    ]
    return changed(
        costs, transfer_ns=latency_ns, message_bytes=times_ns, bandwidth=1.0, shared_links=True
    )


def slowest(box: Box) -> BoxLink | None:
    """As slow in bandwidth and latency as any link of the box; None where it has one device.

    Raises:
        ValueError: Two devices have no link.
    """
    links = [_link(box, *pair) for pair in combinations(range(len(box.devices)), 2)]
    if not links:
        return None
    rate, latency_ns = min(of.bytes_per_ns for of in links), max(of.latency_ns for of in links)
    return BoxLink((tuple(range(len(box.devices))),), rate, latency_ns)


def _links(box: Box, plan: Plan, stage: int) -> list[BoxLink]:
    """The links over the boundary behind a stage, of each replica that crosses devices there."""
    pairs = {homes[stage : stage + 2] for homes in plan.placement.replicas}
    return [_link(box, *pair) for pair in sorted(pairs) if len(set(pair)) == 2]


def _link(box: Box, first: int, second: int) -> BoxLink:
    return known(box.link(first, second), f"link between {first} and {second}")


def _time_ns(link: BoxLink, num_bytes: float) -> float:
    return link.latency_ns + num_bytes / link.bytes_per_ns
