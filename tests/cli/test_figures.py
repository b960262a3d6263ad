"""Figures in tables and below drawings, for plans of any size."""

import pytest

from pykern.cli.catalogue import num_messages
from pykern.cli.memory import numbers
from pykern.plan import Action, Kind
from pykern.schedules import by_name


@pytest.mark.parametrize("name", by_name)
def test_messages_are_those_of_every_action(name: str) -> None:
    """Against a count over all actions: those whose reader is on another device."""
    plan = by_name[name](4, 8)
    counted = 0
    for action in (action for row in plan.rows for action in row):
        step = {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(action.kind, 0)
        if 0 <= action.stage + step < plan.num_stages:
            reader = Action(action.kind, action.stage + step, action.microbatch)
            counted += plan.device_of(reader) != plan.device_of(action)
    assert num_messages(plan) == counted


def test_peaks_that_nobody_can_read_are_not_all_printed() -> None:
    assert numbers([1.0] * 64).split() == ["1"] * 64
    words = numbers([float(number) for number in range(65_000)])
    assert words.startswith("0 1 2 ")
    assert words.endswith("6.5e+04, 6.5e+04 at most")
    assert len(words.split()) == 64 + 4
