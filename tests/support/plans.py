"""Plans written as rows of actions, such as "0F0 0F1 0B0 0B1"."""

from collections.abc import Iterable

from pykern.plan import Action, Placement, Plan


def parsed(rows: Iterable[str]) -> list[list[Action]]:
    """The actions of each row."""
    return [[Action.parse(text) for text in row.split()] for row in rows]


def plan_of(placement: Placement, num_microbatches: int, *rows: str) -> Plan:
    """A plan of these rows."""
    return Plan(placement, num_microbatches, parsed(rows))
