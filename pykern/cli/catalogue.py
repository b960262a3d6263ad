"""Every schedule of the catalogue at the same counts and costs, in figures."""

from collections.abc import Iterator
from itertools import pairwise

from ..plan import Kind, Plan, Timeline, simulate
from ..schedules import by_name
from .memory import peaks_in_shares
from .values import ShareCosts

HEADINGS = (
    "schedule",
    "stages",
    "makespan",
    "bubble ratio",
    "span bubble",
    "peak, W frees",
    "peak, I frees",
    "messages",
)


# A schedule's name, with its plan and timeline, or the reason for a missing plan.
Entry = tuple[str, tuple[Plan, Timeline] | str]


def entries(
    num_devices: int, num_microbatches: int, costs: ShareCosts, transfer_ms: float = 0.0
) -> Iterator[Entry]:
    """The whole catalogue in its order, with options left as they are."""
    for name, schedule in by_name.items():
        try:
            plan = schedule(num_devices, num_microbatches)
        except ValueError as error:
            yield name, str(error)
            continue
        yield name, (plan, simulate(plan, costs.of(plan, transfer_ms)))


def figures(plan: Plan, timeline: Timeline) -> list[str]:
    """Under all headings but the first; memory is that of the fullest device."""
    trains = plan.has(Kind.B) or plan.has(Kind.W)
    peaks = [peaks_in_shares(plan), peaks_in_shares(plan, input_frees=True)]
    return [
        str(plan.num_stages),
        f"{timeline.makespan_ns / 1e6:.4g}",
        f"{timeline.bubble_ratio:.3f}",
        f"{timeline.span_bubble_ratio:.3f}",
        *(f"{max(peak):.3g}" if trains else "" for peak in peaks),
        f"{num_messages(plan) / plan.num_microbatches:g}",
    ]


def num_messages(plan: Plan) -> int:
    """Outputs and gradients that go from one device to another in one step."""
    first_trained = plan.first_trained
    of_replica = []
    for devices in plan.placement.replicas:
        ways = [
            (here != there) * (1 + (stage >= first_trained))
            for stage, (here, there) in enumerate(pairwise(devices))
        ]
        of_replica.append(sum(ways) * plan.num_slices)
    # Replicas take turns with the microbatches.
    return sum(of_replica[m % len(of_replica)] for m in range(plan.num_microbatches))
