"""The causes for which a step takes longer than its work needs, the largest first.

Each cause is worth the time that a step without it would take less. The worths of all causes and
the work, shared evenly among the devices, add up to the measured makespan. Effects of the cut, of
devices and of the schedule are differences of simulations with the measured costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low

from ..columns import counted
from ..partition.unequal import stage_speeds
from ..plan import Costs, Plan, Timeline, Wait, critical_path
from ..plan.costs import by_device
from .observed import Observed
from .stage_costs import (
    balanced,
    makespan_ns,
    mapped,
    message_ns,
    of_stages,
    with_messages,
    without_overhead,
    work_ns,
)

# A device is slow if its layers take so many times as long as alone, and as on other devices.
SLOW = 1.4
# Workers share cores if threads with work have a core for less than this part of their time.
SHARED = 0.9


@dataclass(frozen=True)
class Cause:
    """A cause.

    Attributes:
        name: its name.
        worth_ns: the time that a step would take less without it.
        remedy: the facts behind it, and what to do.
    """

    name: str
    worth_ns: float
    remedy: str


@dataclass(frozen=True)
class Causes:
    """The parts of a step's makespan.

    Attributes:
        work_ns: the work of the layers, shared evenly among the devices.
        found: the causes of the rest, the largest first.
    """

    work_ns: float
    found: tuple[Cause, ...]


def causes_of(seen: Observed) -> Causes:
    """All causes of a step."""
    quiet_ns = seen.quiet.makespan_ns
    threads_ns = seen.timeline.makespan_ns - quiet_ns
    shared = 1 - seen.core_share if _shares_cores(seen) else 0.0
    alone = 1 - shared
    work, rest = _of_plan(seen)
    found = [Cause(cause.name, cause.worth_ns * alone, cause.remedy) for cause in rest]
    if seen.one_thread is not None:
        found.append(
            Cause(
                "competing threads",
                threads_ns,
                f"torch has {seen.torch_threads} threads; with torch.set_num_threads(1) the same "
                f"step takes {quiet_ns / 1e6:.3g} ms",
            )
        )
    if shared:
        found.append(Cause("shared cores", shared * quiet_ns, _share(seen)))
    found.sort(key=lambda cause: -cause.worth_ns)
    return Causes(work * alone, tuple(found))


def _shares_cores(seen: Observed) -> bool:
    more = seen.num_cores is not None and seen.plan.num_devices > seen.num_cores
    return more and seen.core_share < SHARED


def _of_plan(seen: Observed) -> tuple[float, list[Cause]]:
    """The work, and the causes that the plan, its costs and its devices have."""
    plan, costs = seen.plan, seen.quiet_costs
    without_copies = with_messages(costs, [0.0] * plan.num_stages)
    layers = without_overhead(without_copies, plan.num_stages, seen.action_ns)
    fair = with_speeds_undone(layers, plan, device_speeds(seen))
    even = balanced(fair, plan)
    work = work_ns(even, plan) / plan.num_devices
    as_is, at_once, without, fairly, evenly = (
        makespan_ns(plan, each) for each in (costs, without_copies, layers, fair, even)
    )
    issue, hand_over = gaps_on_path(plan, seen.quiet)
    # The part of the gaps that a pipeline without work has as well.
    usual = min(sum(issue), len(issue) * seen.issue_ns)
    usual += min(sum(hand_over), len(hand_over) * seen.hand_over_ns)
    late = "host synchronisation" if seen.host_waits else "late starts"
    return work, [
        Cause("warm-up and cool-down", evenly - work, _warm_up(plan)),
        Cause("imbalance of stages", fairly - evenly, _imbalance(fair, plan)),
        Cause("slow device", without - fairly, _slow_device(seen)),
        Cause("short actions", at_once - without + usual, _short(seen)),
        Cause("waiting for a copy", as_is - at_once, _copy(seen)),
        Cause(late, seen.quiet.makespan_ns - as_is - usual, _late(seen)),
    ]


def gaps_on_path(plan: Plan, measured: Timeline) -> tuple[list[float], list[float]]:
    """The gaps of the critical path: behind an action of the same device, and behind others."""
    issue: list[float] = []
    hand_over: list[float] = []
    for before, step in pairwise(critical_path(plan, measured)):
        of = issue if step.wait is Wait.ROW else hand_over
        of.append(max(step.span.start_ns - before.span.end_ns, 0.0))
    return issue, hand_over


def device_speeds(seen: Observed) -> list[float]:
    """The speed of each device compared with the median; 1 for devices that are not slow."""
    plan = seen.plan
    if not seen.layer_ns:
        return [1.0] * plan.num_devices
    layers = without_overhead(seen.quiet_costs, plan.num_stages, seen.action_ns)
    took = by_device(plan, of_stages(layers, plan))
    alone = by_device(plan, [sum(seen.layer_ns[n] for n in span) for span in seen.spans])
    slower = [one / other if other else 0.0 for one, other in zip(took, alone, strict=True)]
    usual = max(median_low(slower), 1.0)
    return [usual / each if each > SLOW * usual else 1.0 for each in slower]


def with_speeds_undone(costs: Costs, plan: Plan, speeds: list[float]) -> Costs:
    """The costs of stages on devices that are not slow."""
    of_stage = stage_speeds(plan, speeds)
    return mapped(costs, plan.num_stages, lambda _, stage, ns: ns * of_stage[stage])


def _warm_up(plan: Plan) -> str:
    return (
        f"{counted(plan.num_microbatches, 'microbatch')} must fill and empty "
        f"{counted(plan.num_stages, 'stage')}; use more microbatches, or a schedule with a smaller "
        "bubble"
    )


def _imbalance(costs: Costs, plan: Plan) -> str:
    times = of_stages(costs, plan)
    longest = max(range(plan.num_stages), key=times.__getitem__)
    mean = sum(times) / len(times)
    return (
        f"stage {longest} takes {times[longest] / 1e6:.3g} ms for a microbatch, a stage "
        f"{mean / 1e6:.3g} ms on average; cut elsewhere, as balance='time' does"
    )


def _slow_device(seen: Observed) -> str:
    speeds = device_speeds(seen)
    slowest = min(range(len(speeds)), key=speeds.__getitem__)
    if speeds[slowest] == 1:
        return "all devices are about as fast"
    name = "cpu" if seen.num_cores is not None else f"cuda:{slowest}"
    return (
        f"device {slowest} takes {1 / speeds[slowest]:.1f} times as long for its layers; free it "
        f"from other work, or say pykern.Device('{name}', speed={speeds[slowest]:.2g})"
    )


def _copy(seen: Observed) -> str:
    times = message_ns(seen.quiet_costs, seen.plan.num_stages)
    longest = max(range(len(times)), key=times.__getitem__)
    if not times[longest]:
        return "no stage waits for a copy"
    return (
        f"a copy over the boundary behind stage {longest} takes {times[longest] / 1e6:.3g} ms; cut "
        "where less is handed on, or take devices with a faster link"
    )


def _late(seen: Observed) -> str:
    if seen.host_waits:
        lines = ", ".join(seen.host_waits[:3])
        return f"the host waits for a GPU at {lines}, and issues nothing meanwhile; keep tensors"
    if seen.num_cores is None:
        waits = "actions that could begin wait for copies, or for the thread that issues them"
        return waits if seen.captures else f"{waits}; capture=True issues them without Python"
    remedy = "end what else runs on the machine, and avoid long Python code within layers"
    if seen.plan.num_devices > seen.num_cores:
        remedy = _share(seen)
    return f"actions wait for a core or for the interpreter lock, or their times vary; {remedy}"


def _share(seen: Observed) -> str:
    assert seen.num_cores is not None
    cores = counted(seen.num_cores, "core")
    return f"{seen.plan.num_devices} workers share {cores}, so use devices='cpu:{seen.num_cores}'"


def _short(seen: Observed) -> str:
    plan = seen.plan
    layers = without_overhead(seen.quiet_costs, plan.num_stages, seen.action_ns)
    mean, inside = (work_ns(of, plan) / plan.num_actions for of in (seen.quiet_costs, layers))
    return (
        f"an action takes {mean / 1e6:.3g} ms, {inside / 1e6:.3g} ms of it in its layers; "
        "use fewer microbatches, or fewer devices"
    )
