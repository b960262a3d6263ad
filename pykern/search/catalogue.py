"""Starting points of a search: placements, and published schedules with their options."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence

from ..plan import Kind, Placement, Plan, require_counts
from ..schedules import by_name

# The most numbers of chunks per device that are tried: all of them, or this many spread evenly.
MOST_COUNTS = 8
# The approximate number of actions in all plans of one schedule and number of chunks, over groups.
MOST_ACTIONS = 1 << 22

_SYNCHRONOUS = {Kind.F, Kind.B, Kind.I, Kind.W}


def placements(num_devices: int, max_chunks: int) -> Iterator[Placement]:
    """The placements worth a search, with at most `max_chunks` stages on a device.

    The stages go round and round the devices, or down the devices and back up.
    """
    require_counts(num_devices=num_devices, max_chunks=max_chunks)
    counts = _spread(range(1, max_chunks + 1), MOST_COUNTS)
    for chunks in counts:
        yield Placement.looped(num_devices, chunks)
    for chunks in counts:
        # With one chunk per device, or on one device, a wave is the same as a loop.
        if chunks > 1 and num_devices > 1:
            yield wave_of(num_devices, chunks)


def wave_of(num_devices: int, num_chunks: int) -> Placement:
    """A placement down the devices and back up, in `num_chunks` passes; the number may be odd."""
    require_counts(num_devices=num_devices, num_chunks=num_chunks)
    down = list(range(num_devices))
    passes = [down if chunk % 2 == 0 else down[::-1] for chunk in range(num_chunks)]
    return Placement(num_devices, [device for stages in passes for device in stages])


def placement_name(placement: Placement) -> str:
    """The usual name of the placement of a plan with one replica."""
    num_chunks = placement.num_stages // placement.num_devices
    if placement == Placement.looped(placement.num_devices, num_chunks):
        return "linear" if num_chunks == 1 else f"looped, {num_chunks} chunks a device"
    if placement == wave_of(placement.num_devices, num_chunks):
        return "V" if num_chunks == 2 else f"wave of {num_chunks} chunks a device"
    return str(placement)


def published(num_devices: int, num_microbatches: int, max_chunks: int) -> dict[str, Plan]:
    """The plans of the catalogue that a search may start from, by name and options, each once.

    Only synchronous schedules with one replica and unsliced microbatches are included. Overlapped
    pairs run one after the other, since the costs do not tell the gain of an overlap.
    """
    require_counts(
        num_devices=num_devices, num_microbatches=num_microbatches, max_chunks=max_chunks
    )
    plans: dict[str, Plan] = {}
    alike: dict[tuple[int, int], list[Plan]] = {}
    for name, rule in by_name.items():
        for options in _options(rule, num_devices, num_microbatches, max_chunks):
            try:
                plan = rule(num_devices, num_microbatches, **options)
            except ValueError:
                continue  # the schedule does not exist for these counts
            if plan.num_stages > max_chunks * num_devices or not _can_start(plan):
                continue
            if any(plan.overlaps):
                plan = Plan(plan.placement, num_microbatches, plan.rows)
            known = alike.setdefault((plan.num_stages, plan.num_actions), [])
            if plan not in known:
                known.append(plan)
                words = [f"{option}={value}" for option, value in options.items() if value]
                plans[" ".join([name, *words])] = plan
    return plans


def _options(
    rule: Callable[..., Plan], num_devices: int, num_microbatches: int, max_chunks: int
) -> Iterator[dict[str, int | None]]:
    """The options of a schedule that change its plan, in all combinations."""
    worthwhile: dict[str, Sequence[int | None]] = {
        "num_chunks": _spread(range(1, max_chunks + 1), MOST_COUNTS),
        "waves": _spread(range(1, max_chunks // 2 + 1), MOST_COUNTS),
        "group": _groups(num_devices, num_microbatches, max_chunks),
        "optimised": (False, True),
        "early": (False, True),
    }
    names = [name for name in inspect.signature(rule).parameters if name in worthwhile]
    for values in itertools.product(*(worthwhile[name] for name in names)):
        yield dict(zip(names, values, strict=True))


def _groups(num_devices: int, num_microbatches: int, max_chunks: int) -> list[int | None]:
    """The sizes of a group, from half the devices on: one size for each number of groups.

    The schedule cuts microbatches into that number of near-equal groups, so other sizes that give
    the same number of groups would change nothing.
    """
    most = max(2, MOST_ACTIONS // (3 * num_devices * num_microbatches * max_chunks))

    def sizes(least: int, end: int) -> list[int]:
        by_count = {max(1, num_microbatches // size): size for size in range(least, end)}
        return _spread(sorted(by_count.values()), most)

    smaller = sizes(-(-num_devices // 2), num_devices)
    larger = sizes(num_devices + 1, num_microbatches + 1)
    return [None, *smaller, *larger]


def _spread(values: Sequence[int], most: int) -> list[int]:
    """All values, or `most` of them at even distances, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[i * (len(values) - 1) // (most - 1)] for i in range(most)]


def _can_start(plan: Plan) -> bool:
    return (
        plan.placement.num_replicas == 1
        and plan.num_slices == 1
        and plan.num_stages % plan.num_devices == 0
        and not any(plan.has(kind) for kind in Kind if kind not in _SYNCHRONOUS)
        and (plan.has(Kind.B) or plan.has(Kind.I))
    )
