"""The last step of reading a plan from any form of file."""

from collections.abc import Sequence

from pykern._C import Action, Placement, Plan, check

# The largest number of actions in a file. A step of as many actions of 0.1 ms takes minutes on any
# number of devices that a pipeline has.
MAX_ACTIONS = 1 << 20


def require_count(what: str, count: int, limit: int) -> None:
    """Refuses more of something than a plan's file may hold, before anything is made of it."""
    if count > limit:
        raise ValueError(f"{what} of a plan's file must be at most {limit}, got {count}")


def proved_plan(
    placement: Placement,
    num_microbatches: int,
    rows: Sequence[Sequence[Action]],
    num_slices: int,
    overlaps: Sequence[Sequence[int]],
) -> Plan:
    """The plan, once it is known to be runnable.

    A few bytes can name a plan of millions of cells, for all of which `check` takes memory; so a
    plan without an action for every cell is refused before.

    Raises:
        ValueError: The counts do not fit each other, or are more than a file may hold.
        PlanError: The plan breaks a rule.
    """
    num_cells = placement.num_stages * num_microbatches * num_slices
    num_actions = sum(len(row) for row in rows)
    require_count("actions", num_actions, MAX_ACTIONS)
    if num_actions < num_cells:
        raise ValueError(
            f"actions must be at least one for each of {placement.num_stages} stages, "
            f"{num_microbatches} microbatches and {num_slices} slices, got {num_actions}"
        )
    plan = Plan(placement, num_microbatches, rows, num_slices, overlaps)
    check(plan)
    return plan
