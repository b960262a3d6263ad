"""Arguments of wrong types, which pybind11 refused with the signatures of what was called."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from pykern.plan import (
    Action,
    Costs,
    Kind,
    Memory,
    Placement,
    Plan,
    Span,
    Timeline,
    bubbles,
    by_program,
    by_slots,
    check,
    lower,
    peak_bytes,
    simulate,
    with_recompute,
    with_replicas,
)

ONE = Placement.linear(1)
PLAN = by_slots(Placement.linear(2), 2, 1, 2)
COSTS = Costs(1, 2)
WRONG = cast(Any, "x")
NOTHING = cast(Any, None)
LARGE = 1 << 40


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Costs(WRONG, 1), "forward_ns must be a number or a list of numbers, got 'x'"),
        (
            lambda: Costs(1, cast(Any, [1, "a"])),
            "backward_ns must be a number or .*, got .1, 'a'.$",
        ),
        (lambda: Costs(1, 1, NOTHING), "transfer_ns must be a number, got None"),
        (lambda: Costs(1, 1, shared_links=WRONG), "shared_links must be True or False, got 'x'"),
        (lambda: Memory(1, WRONG), "kept_bytes must be .* a list of numbers or None, got 'x'"),
        (lambda: Placement(WRONG, [0]), "num_devices must be an int, got 'x'"),
        (lambda: Placement(2, cast(Any, ["a"])), "device_of_stage must be a list of ints, got"),
        (lambda: Placement.linear(NOTHING), "num_devices must be an int, got None"),
        (lambda: Plan(WRONG, 1, []), "placement must be a Placement, got 'x'"),
        (lambda: Plan(NOTHING, 1, []), "placement must be a Placement, got None"),
        (lambda: Plan(ONE, 1, cast(Any, "F" * 99)), "rows must be .* Actions, got 'F{56}[.]{3}$"),
        (lambda: Action(WRONG, 0, 0), "kind must be a Kind, got 'x'"),
        (lambda: Action(Kind.F, cast(Any, 1.5), 0), "stage must be an int, got 1.5"),
        (lambda: Action.parse(cast(Any, 3)), "text must be a string, got 3"),
        (lambda: Span(WRONG, 0, 1), "action must be an Action, got 'x'"),
        (lambda: Timeline(cast(Any, [[3]])), "rows must be a list of lists of Spans, got"),
        (lambda: simulate(WRONG, COSTS), "plan must be a Plan, got 'x'"),
        (lambda: simulate(PLAN, NOTHING), "costs must be Costs, got None"),
        (lambda: simulate(PLAN, COSTS).busy_ns(WRONG), "device must be an int, got 'x'"),
        (lambda: bubbles(WRONG, COSTS), "plan must be a Plan, got 'x'"),
        (lambda: bubbles(PLAN, WRONG), "measured must be a Timeline, got 'x'"),
        (lambda: check(NOTHING), "plan must be a Plan, got None"),
        (lambda: peak_bytes(PLAN, WRONG), "memory must be a Memory, got 'x'"),
        (lambda: lower(WRONG), "plan must be a Plan, got 'x'"),
        (lambda: with_recompute(PLAN, WRONG, COSTS), "cells must be a list of Actions, got 'x'"),
        (lambda: with_replicas(PLAN, WRONG), "num_replicas must be an int, got 'x'"),
        (lambda: by_program(ONE, 1, WRONG), "programs must be a list of lists of pairs of an int"),
        (lambda: PLAN.has(WRONG), "kind must be a Kind, got 'x'"),
        (lambda: PLAN.device_of(WRONG), "action must be an Action, got 'x'"),
    ],
)
def test_wrong_types_are_refused_by_name(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=rf"^{message}"):
        call()


def test_numbers_that_no_int_of_the_core_holds_are_refused_by_their_range() -> None:
    with pytest.raises(ValueError, match="num_devices must be -2147483648 to 2147483647, got 109"):
        Placement(LARGE, [0])
