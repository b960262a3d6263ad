"""From the user's `recompute` to a level for each microbatch of each stage."""

from __future__ import annotations

from collections.abc import Sequence

from ..one_of import require_one_of
from ..plan import Action, Costs, Kind, Memory, Plan, peak_bytes, with_recompute
from ..plan.counts import one_for_each
from ..runtime.recompute.recompute import INPUTS, LEVELS, Level

# One level for all stages, or an entry for each: a level, or one for each microbatch.
RecomputeArgument = Level | Sequence[Level | Sequence[Level | None] | None] | None

# An R takes as long as an F, a B twice as long.
_USUAL = Costs(1.0, 2.0)

# The levels by stage and microbatch.
Levels = Sequence[Sequence[Level | None]]


def choose_levels(plan: Plan, recompute: RecomputeArgument) -> tuple[Plan, Levels]:
    """The plan with an R for each microbatch that is recomputed, and all levels.

    A plan that has any R is run unchanged: only the microbatches of its R are recomputed.

    Args:
        plan: the plan of a schedule, or the user's.
        recompute: the user's argument.

    Raises:
        ValueError: a level is unknown, the number of levels does not fit the stages or
            microbatches, or the plan has no backward.
    """
    if recompute == "auto":
        raise ValueError(
            "recompute must be a level or a Budget, got 'auto'. Say what fits: "
            "recompute=pykern.Budget(num_bytes, sample)"
        )
    levels = _of_stages(plan, recompute)
    recomputes = any(level in INPUTS for of_stage in levels for level in of_stage)
    if recomputes and not (plan.has(Kind.B) or plan.has(Kind.I)):
        raise ValueError(f"recompute must be None for a plan without backwards, got {recompute!r}")
    first_trained = plan.first_trained
    cells = [
        Action(Kind.R, stage, microbatch)
        for stage, of_stage in enumerate(levels)
        for microbatch, level in enumerate(of_stage)
        # A stage without a backward keeps nothing at any level.
        if level in INPUTS and stage >= first_trained
    ]
    if cells and not plan.has(Kind.R):
        plan = _recomputed(plan, cells)
    return plan, _as_planned(plan, levels)


def _recomputed(plan: Plan, cells: Sequence[Action]) -> Plan:
    """The plan with an R for each cell, by which every device that can holds fewer cells at once.

    An R that fills a wait makes a cell whole before the one in front is done with: two at once,
    which is all that a device with two cells in flight would hold anyway.
    """
    early = with_recompute(plan, cells, _USUAL)
    whole = Memory(1.0, boundary_bytes=0.0)
    pairs = list(zip(peak_bytes(plan, whole), peak_bytes(early, whole), strict=True))
    recomputed = {cell.stage for cell in cells}
    devices_of = [set(devices) for devices in zip(*plan.placement.replicas, strict=True)]
    having = set().union(*(devices_of[stage] for stage in recomputed))
    if all(held < before or before <= 1 for d, (before, held) in enumerate(pairs) if d in having):
        return early
    most = [held if held < before else max(before - 1, 1) for before, held in pairs]
    shares = [1 / min(most[device] for device in devices) for devices in devices_of]
    cells_held = Memory(shares, boundary_bytes=[0.0] * plan.num_stages)
    return with_recompute(plan, cells, _USUAL, cells_held, 1 + 1e-9)


def _of_stages(plan: Plan, recompute: RecomputeArgument) -> list[list[Level | None]]:
    levels = []
    for stage, wanted in enumerate(one_for_each("recompute", recompute, plan.num_stages, "stages")):
        name = f"recompute of stage {stage}"
        levels.append(one_for_each(name, wanted, plan.num_microbatches, "microbatches"))
        for level in levels[-1]:
            if level is not None:
                require_one_of(name, level, LEVELS)
    return levels


def _as_planned(plan: Plan, levels: Sequence[Sequence[Level | None]]) -> Levels:
    """Levels with inputs where the plan has an R, and there alone."""
    planned: list[list[Level | None]] = [
        [None if level in INPUTS else level for level in of_stage] for of_stage in levels
    ]
    for row in plan.rows:
        for action in row:
            if action.kind is Kind.R:
                level = levels[action.stage][action.microbatch]
                planned[action.stage][action.microbatch] = level if level in INPUTS else "stage"
    return planned
