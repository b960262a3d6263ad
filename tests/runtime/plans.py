"""Plans with split backward and with replicas, derived by hand."""

from pykern.plan import Action, Kind, Placement, Plan


def split_backward(plan: Plan, delay: int = 1) -> Plan:
    """Every B as an I and a W, the W on its device at least `delay` I later, or at the end."""
    rows = []
    for row in plan.rows:
        new: list[Action] = []
        waiting: list[Action] = []
        for action in row:
            if action.kind is not Kind.B:
                new.append(action)
                continue
            new.append(Action(Kind.I, action.stage, action.microbatch))
            waiting.append(Action(Kind.W, action.stage, action.microbatch))
            if len(waiting) > delay:
                new.append(waiting.pop(0))
        rows.append(new + waiting)
    return Plan(plan.placement, plan.num_microbatches, rows)


def split_some(plan: Plan) -> Plan:
    """Every B of an odd stage as an I with its W right behind."""
    rows = []
    for row in plan.rows:
        new: list[Action] = []
        for action in row:
            split = action.kind is Kind.B and action.stage % 2 == 1
            kinds = (Kind.I, Kind.W) if split else (action.kind,)
            new += [Action(kind, action.stage, action.microbatch) for kind in kinds]
        rows.append(new)
    return Plan(plan.placement, plan.num_microbatches, rows)


def late_weights(plan: Plan) -> Plan:
    """Every B of the last device as an I, with all its W at the end."""
    *rows, last = plan.rows
    row = [Action(Kind.I, a.stage, a.microbatch) if a.kind is Kind.B else a for a in last]
    row += [Action(Kind.W, a.stage, a.microbatch) for a in row if a.kind is Kind.I]
    return Plan(plan.placement, plan.num_microbatches, [*rows, row])


def two_replicas(num_devices: int, num_microbatches: int) -> Plan:
    """Both directions at once, as in Chimera: F of all microbatches, then B of all."""
    placement = Placement.bidirectional(num_devices)
    rows: list[list[Action]] = [[] for _ in range(num_devices)]
    down, up = range(num_devices), range(num_devices)[::-1]
    for kind, stages in ((Kind.F, down), (Kind.B, up)):
        # The replicas take turns, so that each device has work in both directions.
        for microbatch in range(num_microbatches):
            for stage in stages:
                device = placement.device_of(stage, microbatch % 2)
                rows[device].append(Action(kind, stage, microbatch))
    return Plan(placement, num_microbatches, rows)


def recomputed(plan: Plan, *, late: bool = True) -> Plan:
    """With an R of every cell: right before its B or I, or right behind its F."""
    rows = []
    for row in plan.rows:
        new: list[Action] = []
        for action in row:
            recompute = Action(Kind.R, action.stage, action.microbatch)
            if late and action.kind in (Kind.B, Kind.I):
                new.append(recompute)
            new.append(action)
            if not late and action.kind is Kind.F:
                new.append(recompute)
        rows.append(new)
    return Plan(plan.placement, plan.num_microbatches, rows)
