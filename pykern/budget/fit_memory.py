"""The peak memory of devices while a plan runs at given levels, over all timings of actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter

from ..plan import Action, Kind, Plan
from ..plan.inputs import inputs
from .level_costs import BACKWARD, HeldBytes, StageCosts, StageLevel

_STAGE = itemgetter(1)


def most_held(
    plan: Plan, stages: Sequence[StageCosts], levels: Sequence[StageLevel]
) -> list[float]:
    """The peak bytes by device, over all orders of actions that the plan allows.

    Bytes that another device frees count until an action of that device must have run.

    Args:
        plan: with the R of every cell that is recomputed.
        stages: the costs of each level of each stage.
        levels: one level for each stage.
    """
    clocks, held = _clocks(plan), _cells(plan, stages, levels)
    rows = plan.rows
    keys = [[(a.kind, a.stage, a.microbatch) for a in row] for row in rows]
    most = [_most(row, device, held, clocks, keys) for device, row in enumerate(rows)]
    for homes in plan.placement.replicas:
        for device, costs in zip(homes, stages, strict=True):
            most[device] += costs.step_bytes
    return most


def held_by_action(
    plan: Plan, stages: Sequence[StageCosts], levels: Sequence[StageLevel]
) -> dict[Action, float]:
    """By action, how many bytes more its device holds behind it, but for those of other cells.

    Args:
        plan: as of `most_held`.
        stages: likewise.
        levels: likewise.
    """
    held = _cells(plan, stages, levels)
    actions = (action for row in plan.rows for action in row)
    return {a: held[a.stage, a.microbatch].own.get(a.kind, 0.0) for a in actions}


def _cells(
    plan: Plan, stages: Sequence[StageCosts], levels: Sequence[StageLevel]
) -> dict[tuple[int, int], HeldBytes]:
    """The bytes of each microbatch of each stage."""
    again = {(a.stage, a.microbatch) for row in plan.rows for a in row if a.kind is Kind.R}
    split = plan.has(Kind.W)
    # All microbatches of a stage hold the same, but for what is recomputed of some.
    of_stage = {
        (stage, repeats): _held(costs, level, stage, repeats, split=split)
        for stage, (costs, level) in enumerate(zip(stages, levels, strict=True))
        for repeats in (False, True)
    }
    return {
        (stage, microbatch): of_stage[stage, (stage, microbatch) in again]
        for stage in range(plan.num_stages)
        for microbatch in range(plan.num_microbatches)
    }


def _held(
    costs: StageCosts, level: StageLevel, stage: int, again: bool, *, split: bool
) -> HeldBytes:
    """The bytes of one cell: measured, or from the sizes of its level."""
    kept, rebuilt = costs.kept[level.kept], costs.rebuilt.get(level.rebuilt or "")
    measured = rebuilt.held if again and rebuilt is not None else kept.held
    if measured is not None:
        return measured
    whole = first = kept.activation_bytes
    if again and rebuilt is not None:
        first, whole = rebuilt.boundary_bytes, rebuilt.activation_bytes
    later = kept.weights_bytes if split else 0.0
    gradient = costs.gradient_bytes if stage > 0 else 0.0
    own = {Kind.F: first, Kind.R: whole - first, Kind.W: -later}
    own |= dict.fromkeys(BACKWARD, later - whole + gradient)
    others = {(kind, stage - 1): -gradient for kind in BACKWARD if gradient}
    return HeldBytes(own, dict.fromkeys(Kind, costs.workspace_bytes), others)


def _most(
    row: Sequence[Action],
    device: int,
    held: Mapping[tuple[int, int], HeldBytes],
    clocks: Mapping[Action, Sequence[int]],
    keys: Sequence[Sequence[tuple[Kind, int, int]]],
) -> float:
    """The peak of one device. Keys are those of `_by_others`, of all rows of the plan."""
    added = _by_others(row, held)
    adders = {stage for _, stage, _ in added}
    # By device and number of its actions that have run: the bytes that these have released.
    let_go = [
        [0.0] * (len(of) + 1)
        if adders.isdisjoint(map(_STAGE, of))
        else [0.0, *accumulate(added.get(key, 0.0) for key in of)]
        for of in keys
    ]
    # Most devices add nothing, at any time.
    adding = [(d, of) for d, of in enumerate(let_go) if d != device and any(of)]
    most = own = 0.0
    for position, action in enumerate(row):
        gone = sum(of[clocks[action][d]] for d, of in adding)
        before = own + gone + let_go[device][position]
        of_cell = held[action.stage, action.microbatch]
        own += of_cell.own.get(action.kind, 0.0)
        after = own + gone + let_go[device][position + 1]
        most = max(most, max(before, after) + of_cell.beside.get(action.kind, 0.0))
    return most


def _by_others(
    row: Sequence[Action], held: Mapping[tuple[int, int], HeldBytes]
) -> dict[tuple[Kind, int, int], float]:
    """By action of another stage, the bytes that it adds to the cells of a device's row."""
    added: dict[tuple[Kind, int, int], float] = {}
    for cell in sorted({(action.stage, action.microbatch) for action in row}):
        for (kind, stage), num_bytes in held[cell].others.items():
            if stage != cell[0]:
                key = kind, stage, cell[1]
                added[key] = added.get(key, 0.0) + num_bytes
    return added


def _clocks(plan: Plan) -> dict[Action, list[int]]:
    """For each action, the number of actions of each device run when it begins, with itself."""
    clocks: dict[Action, list[int]] = {}
    # Each look at the rows makes objects of all actions.
    rows = plan.rows
    planned = {action for row in rows for action in row}
    done = [0] * plan.num_devices
    now = [[0] * plan.num_devices for _ in rows]
    while any(done[d] < len(row) for d, row in enumerate(rows)):
        for device, row in enumerate(rows):
            while done[device] < len(row):
                action = row[done[device]]
                needed = planned.intersection(inputs(action))
                if not needed <= clocks.keys():
                    break
                seen = [now[device], *(clocks[each] for each in needed)]
                clock = [*map(max, *seen)] if needed else [*now[device]]
                done[device] += 1
                clock[device] = done[device]
                clocks[action] = now[device] = clock
    return clocks
