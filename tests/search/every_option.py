"""The catalogue with all of its options, listed one by one: what the search is measured against."""

import inspect
import itertools
from collections.abc import Callable, Iterator

from pykern.plan import Costs, Kind, Memory, Plan, peak_bytes, simulate
from pykern.schedules import by_name

_COMPUTE = {Kind.F, Kind.B, Kind.I, Kind.W}


def every_option(num_devices: int, num_microbatches: int, max_chunks: int) -> dict[str, Plan]:
    """The plans that a search may make, by name and options, without those that are alike."""
    plans: dict[str, Plan] = {}
    for name, rule in by_name.items():
        for options in _options(rule, num_microbatches, max_chunks):
            try:
                plan = rule(num_devices, num_microbatches, **options)
            except ValueError:
                continue
            if not _is_comparable(plan, max_chunks):
                continue
            plan = Plan(plan.placement, num_microbatches, plan.rows)
            if plan not in plans.values():
                plans[f"{name} {options}"] = plan
    return plans


def _options(rule: object, num_microbatches: int, max_chunks: int) -> Iterator[dict[str, object]]:
    assert callable(rule)
    values = {
        "num_chunks": range(1, max_chunks + 1),
        "waves": range(1, max_chunks // 2 + 1),
        "group": range(1, 2 * num_microbatches + 1),
        "optimised": (False, True),
        "doubling": (False, True),
        "early": (False, True),
        "num_slices": (1,),
    }
    names = list(inspect.signature(rule).parameters)[2:]
    for chosen in itertools.product(*(values[name] for name in names)):
        yield dict(zip(names, chosen, strict=True))


def _is_comparable(plan: Plan, max_chunks: int) -> bool:
    return (
        plan.placement.num_replicas == 1
        and plan.num_slices == 1
        and plan.num_stages % plan.num_devices == 0
        and plan.num_stages <= max_chunks * plan.num_devices
        and not any(plan.has(kind) for kind in Kind if kind not in _COMPUTE)
        and (plan.has(Kind.B) or plan.has(Kind.I))
    )


def best_of(
    plans: dict[str, Plan], costs_of: Callable[[int], Costs], memory: float
) -> tuple[float, str]:
    """The least makespan under the cap, of which schedule; infinite where nothing fits."""
    best = (float("inf"), "")
    for name, plan in plans.items():
        costs = costs_of(plan.num_stages)
        held = Memory(plan.num_devices / plan.num_stages)
        if max(peak_bytes(plan, held)) <= memory * plan.num_devices * (1 + 1e-9):
            best = min(best, (simulate(plan, costs).makespan_ns, name))
    return best
