"""The search: the best plan for given costs under a memory cap, over placements and schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Literal, get_args

from .._C import WORK_PER_MS, Candidate
from .._C import search as _search
from ..columns import counted
from ..one_of import require_one_of
from ..plan import Costs, Kind, Memory, Placement, Plan, peak_bytes, require_counts, simulate
from ..plan.costs import changed, require_costs_or_function, require_made_costs
from ..plan.counts import one_for_each, require_numbers
from ..plan.halves import forwards_first
from .catalogue import placement_name, placements, published

# Most stages on a device, if the caller gives no number.
MAX_CHUNKS = 4
# Most stages times microbatches; the published schedules alone then take seconds and a GB to try.
MAX_SEARCHED = 1 << 19

# The costs of a device's share of the model, which its stages share evenly.
_SHARED = ("forward_ns", "backward_ns", "recompute_ns", "input_ns", "weight_ns")

# Costs of one device's share of the model, or lists by stage; or a function of a number of stages.
CostsOf = Costs | Callable[[int], Costs]
# The place where losses are computed: in the last stage, or by the caller, who gets the output of
# the pipeline; the second needs all forwards before any backward.
LossPlace = Literal["inside", "outside"]


@dataclass(frozen=True)
class Found:
    """The result of a search: the best plan, with measures of its quality.

    Attributes:
        plan: The plan.
        costs: Costs of the plan's stages.
        memory: Memory of the plan's stages, in microbatch activations of one device's share.
        makespan_ns: Makespan of the plan, by the simulator.
        bound_ns: Lower bound on the makespan of every order on all the placements.
        proven: Whether the makespan is the bound, so that no plan is better.
        peak: Most that each device holds, in microbatch activations of one device's share.
        cap: Most that each device may hold, in the same unit.
        seeds: Makespan in ns of each published schedule that keeps the cap, by name and options.
        refused: Published schedules that break the cap, by name and options.
        work_ms: Work done, in milliseconds of one core as the search counts them.
        loss: Place of the loss; if it is outside, all plans have their forwards first.
    """

    plan: Plan
    costs: Costs
    memory: Memory
    makespan_ns: float
    bound_ns: float
    proven: bool
    peak: tuple[float, ...]
    cap: tuple[float, ...]
    seeds: Mapping[str, float]
    refused: tuple[str, ...]
    work_ms: float
    loss: LossPlace

    @property
    def gap(self) -> float:
        """The makespan's excess over the bound, as a share of the bound; 0 is optimal."""
        return self.makespan_ns / self.bound_ns - 1

    def __str__(self) -> str:
        num_devices = self.plan.num_devices
        quality = "proven optimal" if self.proven else f"at most {self.gap:.1%} above the optimum"
        lines = [
            f"{placement_name(self.plan.placement)}, {counted(self.plan.num_stages, 'stage')}, "
            f"{counted(self.plan.num_microbatches, 'microbatch')}",
            f"makespan {_ms(self.makespan_ns)}, lower bound {_ms(self.bound_ns)}: {quality}",
            f"memory {max(self.peak) / num_devices:.3g}x of at most "
            f"{max(self.cap) / num_devices:.3g}x, where 1x is 1F1B's",
            f"searched for {self.work_ms:.0f} ms of one core, as counted",
        ]
        for name, makespan_ns in self._best_seeds():
            gain = 1 - self.makespan_ns / makespan_ns
            said = f"{gain:6.1%} less time than" if gain > 5e-4 else "  the same time as"
            lines.append(f"  {said} {name}")
        if not _knows_splits(self.costs):
            lines.append("  without split backwards: the costs do not know I and W")
        if over := self._over_the_cap():
            lines.append(f"  over the memory cap: {', '.join(over)}")
        return "\n".join(lines)

    def _best_seeds(self) -> list[tuple[str, float]]:
        """Each schedule with its fastest options, the fastest schedule first."""
        best: dict[str, tuple[str, float]] = {}
        for name, makespan_ns in sorted(self.seeds.items(), key=lambda item: item[1]):
            best.setdefault(_schedule_of(name), (name, makespan_ns))
        return list(best.values())

    def _over_the_cap(self) -> list[str]:
        """The schedules that break the memory cap with all of their options."""
        within = set(map(_schedule_of, self.seeds))
        return list(dict.fromkeys(n for n in map(_schedule_of, self.refused) if n not in within))


def auto(  # noqa: PLR0913 - what a search is about, by keyword
    num_devices: int,
    num_microbatches: int,
    *,
    costs: CostsOf = Costs(1.0, 2.0),  # noqa: B008 - immutable
    memory: float | Sequence[float] | None = None,
    kept: float = 1.0,
    budget_ms: float = 100,
    seed: int = 0,
    max_chunks: int = MAX_CHUNKS,
    loss: LossPlace = "inside",
) -> Found:
    """The best plan that a search finds, never worse than a published schedule at equal memory.

    The same arguments give the same plan on every machine: the budget is counted work, not time.
    A published schedule that is as fast as the best found, with fewer actions, is taken for it.

    Args:
        num_devices: Number of devices.
        num_microbatches: Number of microbatches of one step.
        costs: Costs of one device's share of the model, shared evenly by its stages; or costs with
            lists by stage, which leave out plans of other numbers of stages; or a function from a
            number of stages to the costs of these stages.
        memory: Most that a device may hold, for all or for each, in units of 1F1B's peak:
            `num_devices` microbatch activations of one device's share. None for 1; if the loss is
            outside, None for the activations of all microbatches, which every plan then holds.
        kept: Share of an activation that is held on from the end of I to the end of W, 0 to 1.
        budget_ms: Work, in milliseconds of one core: 100 for a quick search, 1000 to 10000 to tune.
        seed: Seed of the random choices, 0 to 2**64 - 1.
        max_chunks: Most stages on one device.
        loss: "outside" if the caller computes the loss from the pipeline's output. Each device then
            runs all its forwards before any backward, published schedules too.

    Returns:
        The plan with its makespan, a proven lower bound, its memory, and the schedules it beat.

    Raises:
        TypeError: A count is not an int, `costs` are not Costs or a function that makes them, or
            `memory`, `kept` or `budget_ms` is not a number.
        ValueError: A number is out of range, no plan has as many stages as the costs, a time that
            every plan needs is not known, or no plan fits in the memory.
    """
    require_counts(
        num_devices=num_devices, num_microbatches=num_microbatches, max_chunks=max_chunks
    )
    _require_searchable(num_devices * max_chunks * num_microbatches)
    require_costs_or_function(costs)
    require_numbers(kept=kept)
    if not 0 <= kept <= 1:
        raise ValueError(f"kept must be 0 to 1, got {kept}")
    if not (isinstance(seed, Integral) and 0 <= seed < 1 << 64):
        raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, got {seed!r}")
    require_numbers(budget_ms=budget_ms)
    require_one_of("loss", loss, get_args(LossPlace))
    outside = loss == "outside"
    cap = _cap(memory, num_devices, num_microbatches if outside else 0)
    tried = _of_as_many_stages(placements(num_devices, max_chunks), costs)
    make = partial(_candidate, costs=costs, kept=kept, outside=outside)
    candidates = {placement: make(placement) for placement in tried}
    lengths = {placement.num_stages for placement in candidates}
    plans = {}
    for name, plan in published(num_devices, num_microbatches, max_chunks).items():
        if plan.num_stages not in lengths:
            continue
        candidate = candidates.setdefault(plan.placement, make(plan.placement))
        if _knows_splits(candidate.costs) or not plan.has(Kind.I):
            plans[name] = forwards_first(plan) if outside else plan
    index = {placement: i for i, placement in enumerate(candidates)}
    seeds = [(index[plan.placement], plan) for plan in plans.values()]
    result = _search([*candidates.values()], num_microbatches, cap, seeds, budget_ms, seed)
    makespans = dict(zip(plans, result.seed_makespans_ns, strict=True))
    as_fast = [plans[name] for name, ns in makespans.items() if ns <= _rounded(result.makespan_ns)]
    # Each action takes its time to issue.
    best = min([result.plan, *as_fast], key=lambda plan: plan.num_actions)
    candidate = candidates[best.placement]
    return Found(
        plan=best,
        costs=candidate.costs,
        memory=candidate.memory,
        makespan_ns=simulate(best, candidate.costs).makespan_ns,
        bound_ns=result.bound_ns,
        proven=result.proven,
        peak=tuple(peak_bytes(best, candidate.memory)),
        cap=cap,
        seeds={name: ns for name, ns in makespans.items() if math.isfinite(ns)},
        refused=tuple(name for name, ns in makespans.items() if not math.isfinite(ns)),
        work_ms=result.work / WORK_PER_MS,
        loss=loss,
    )


def _require_searchable(num_cells: int) -> None:
    if num_cells > MAX_SEARCHED:
        raise ValueError(
            f"num_devices * max_chunks * num_microbatches must be at most {MAX_SEARCHED}, got "
            f"{num_cells}. Search with fewer microbatches: the order repeats for larger numbers"
        )


def _rounded(time_ns: float) -> float:
    """The most that is the same to the search, which rounds times to a billionth."""
    return time_ns * (1 + 1e-9)


def _cap(
    memory: float | Sequence[float] | None, num_devices: int, all_held: int
) -> tuple[float, ...]:
    """The cap of each device, at least `all_held` microbatch activations of a device's share."""
    if memory is None:
        memory = max(1.0, all_held / num_devices)
    shares: list[float] = one_for_each("memory", memory, num_devices, "devices")
    for share in shares:
        require_numbers(memory=share)
        if not share > 0 or math.isinf(share):
            raise ValueError(f"memory must be finite and above 0, got {share}")
        if share * num_devices < 1 - 1e-9:
            raise ValueError(
                f"memory must be at least 1 / num_devices = {1 / num_devices:.3g}, which holds one "
                f"microbatch, got {share}"
            )
        if share * num_devices < all_held - 1e-9:
            raise ValueError(
                "memory must be at least num_microbatches / num_devices = "
                f"{all_held / num_devices:.3g} with loss='outside', where a device holds the "
                f"activations of all microbatches, got {share}. Leave it out, or use fewer "
                "microbatches, or recompute"
            )
    return tuple(share * num_devices for share in shares)


def _candidate(placement: Placement, costs: CostsOf, kept: float, outside: bool) -> Candidate:
    num_chunks = placement.num_stages / placement.num_devices
    activation = 1 / num_chunks
    held = Memory(activation, kept * activation)
    if not isinstance(costs, Costs):
        made = require_made_costs(costs(placement.num_stages))
        return Candidate(placement, made, held, outside)
    of_stages = _stage_lists(costs)
    own = costs if of_stages else _share(costs, num_chunks)
    return Candidate(placement, own, held, outside)


def _stage_lists(costs: Costs) -> dict[str, int]:
    """The length of each of the costs that is a list by stage."""
    values = {name: getattr(costs, name) for name in (*_SHARED, "message_bytes")}
    return {name: len(value) for name, value in values.items() if isinstance(value, list)}


def _of_as_many_stages(placements: Iterable[Placement], costs: CostsOf) -> list[Placement]:
    """The placements with as many stages as the lists of the costs; all if there are no lists."""
    tried = list(placements)
    lists = _stage_lists(costs) if isinstance(costs, Costs) else {}
    for name, length in lists.items():
        tried_before = sorted({placement.num_stages for placement in tried})
        tried = [placement for placement in tried if placement.num_stages == length]
        if not tried:
            raise ValueError(
                f"{name} must hold one value for each of as many stages as a plan may have, which "
                f"is {' or '.join(map(str, tried_before))} here, got {length}. Change max_chunks "
                "or the devices, or give a function from a number of stages to their costs"
            )
    return tried


def _share(costs: Costs, num_chunks: float) -> Costs:
    """The costs of one chunk of a device."""
    return changed(costs, **{name: getattr(costs, name) / num_chunks for name in _SHARED})


def _schedule_of(seed: str) -> str:
    """The name of a seed's schedule, without its options."""
    return seed.partition(" ")[0]


def _knows_splits(costs: Costs) -> bool:
    """Whether I and W have a time on every stage."""
    halves = (costs.input_ns, costs.weight_ns)
    return not any(
        math.isnan(time)
        for times in halves
        for time in (times if isinstance(times, list) else [times])
    )


def _ms(time_ns: float) -> str:
    return f"{time_ns / 1e6:.6g} ms"
