"""Costs of stages follow from those of units."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pykern.plan import Costs, Plan, check, simulate, with_replicas
from pykern.schedules import one_f_one_b, zb_h1
from pykern.tuning.asked import Asked
from pykern.tuning.by_unit import by_unit, even_spans
from pykern.tuning.gaps import gaps
from pykern.tuning.measure import _action_ns, _usual, that_fit
from pykern.tuning.measurements import Measurements
from pykern.tuning.rounds import Rounds

from .synthetic import measurements

SPANS = [range(1), range(1, 3)]


def test_a_stage_takes_what_its_units_take() -> None:
    costs = measurements([10.0, 20.0, 30.0]).costs(SPANS, 1)
    assert costs.forward_ns == [10.0, 50.0]
    assert costs.backward_ns == [20.0, 100.0]


def test_an_action_is_paid_for_once_in_a_stage() -> None:
    costs = measurements([10.0, 20.0, 30.0], action_ns=dict.fromkeys("FBIW", (4.0, 4.0))).costs(
        SPANS, 1
    )
    assert costs.forward_ns == [10.0, 46.0]


def test_on_shared_cores_an_action_loses_time_and_so_does_each_of_its_units() -> None:
    costs = measurements([10.0, 20.0, 30.0], crowded_ns=1.0).costs(SPANS, 1)
    assert costs.forward_ns == [12.0, 53.0]
    assert costs.backward_ns == [22.0, 103.0]
    # A first stage of one unit.
    assert costs.input_ns == [12.0, 53.0]
    assert costs.weight_ns == [22.0, 53.0]


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_sum_has_the_gradients_of_all_further_replicas(replicas: int) -> None:
    plan = with_replicas(one_f_one_b(2, 2), replicas)
    costs = measurements([10.0, 20.0, 30.0]).costs_of(plan, SPANS, 1)
    assert costs.reduce_ns == [1000.0 * (replicas - 1), 2000.0 * (replicas - 1)]
    assert costs.forward_ns == [10.0, 50.0]


def test_the_first_stage_hands_no_gradient_on() -> None:
    costs = measurements([10.0, 20.0, 30.0]).costs([range(2), range(2, 3)], 1)
    # Its I has next to nothing to do, as in a first stage of one unit; its W is a whole B.
    assert costs.input_ns == [10.0, 30.0]
    assert costs.weight_ns == [60.0, 30.0]


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_costs_are_on_the_line_through_two_sizes(rows: int) -> None:
    line = ((15.0,), (30.0,))  # 10 + 5 * rows
    found = measurements([1.0], times_ns=dict.fromkeys("FBIW", line)).of_units("F", rows)
    assert found == [10 + 5 * rows]


def test_measurements_are_read_as_they_were_written() -> None:
    found = measurements([10.0, 20.0], crowded_ns=5.0, replica_ns=float("inf"))
    assert Measurements.from_json(found.to_json()) == found


def rounds(plan: Plan, forward_ns: list[list[float]]) -> Rounds:
    """Rounds of steps with one size, 4 rows, whose F took so long in each stage."""
    found = Rounds("FB", cast(Any, SimpleNamespace(plan=plan)), {})
    found.costs[4] = [Costs(of_round, 1.0) for of_round in forward_ns]
    return found


def test_what_a_further_stage_costs_is_seen_beside_few_stages() -> None:
    fine = rounds(
        one_f_one_b(4, 4), [[10.0, 20.0, 30.0, 40.0], [12.0] * 4, [10.0, 20.0, 30.0, 40.0]]
    )
    coarse = rounds(one_f_one_b(2, 4), [[24.0, 60.0]])
    assert _action_ns([fine], coarse, "F", 4) == 8.0
    # Actions of few stages that took longer, and as many stages, tell nothing.
    assert _action_ns([coarse], fine, "F", 4) == 0.0
    assert _action_ns([fine], fine, "F", 4) == 0.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the text must be JSON, got its end"),
        ("[]", "the value must be a dict"),
        ("{}", "the value must have the keys"),
        ('{"units": 1}', "the value must have the keys"),
    ],
)
def test_other_files_are_refused(text: str, told: str) -> None:
    """The message showed an error of Python as code."""
    expected = rf"measurements must be those of pykern.tune, got another text: {told}"
    with pytest.raises(ValueError, match=expected):
        Measurements.from_json(text)


@pytest.mark.parametrize("changes", [{"crowded": [1.0, 2.0]}, {}])
def test_files_of_another_version_are_refused(changes: dict[str, Any]) -> None:
    content = json.loads(measurements([10.0]).to_json())
    del content["crowded_ns"]
    with pytest.raises(ValueError, match=r"those of pykern\.tune, got .*delete it"):
        Measurements.from_json(json.dumps(content | changes))


def test_files_without_pairs_of_units_are_refused() -> None:
    content = json.loads(measurements([10.0]).to_json())
    content["sizes"] = {"activation": content["sizes"]["handed"]}
    with pytest.raises(
        ValueError, match=r"those of pykern\.tune, got .*sizes must have pairs, got .*delete it"
    ):
        Measurements.from_json(json.dumps(content))


@pytest.mark.parametrize("rule", [one_f_one_b, zb_h1])
def test_units_run_in_the_order_of_their_stages(rule: Callable[[int, int], Plan]) -> None:
    plan = rule(2, 4)
    fine = by_unit(plan, even_spans(5, 2))
    check(fine)
    assert fine.num_stages == 5
    first = [str(action) for action in fine.rows[0]]
    assert first[:2] == ["0F0", "1F0"]
    # The same costs, shared out: the same step.
    spans = even_spans(5, 2)
    units = [float(unit + 1) for unit in range(5)]
    shared = Costs(units, units, input_ns=units, weight_ns=units)
    stages = [sum(units[unit] for unit in span) for span in spans]
    whole = Costs(stages, stages, input_ns=stages, weight_ns=stages)
    assert simulate(fine, shared).makespan_ns <= simulate(plan, whole).makespan_ns


def test_gaps_are_told_apart_by_what_was_waited_for() -> None:
    plan = one_f_one_b(2, 2)
    timeline = simulate(plan, Costs(10.0, 20.0, 3.0, overhead_ns=0.0))
    issued, handed = gaps(plan, timeline)
    assert set(issued) == {0.0}
    assert set(handed) == {3.0}
    # Every action but the first of the step began after something.
    assert len(issued) + len(handed) == plan.num_actions - 1


def test_speeds_are_those_of_the_size() -> None:
    found = measurements([1.0], speeds=((1.6, 1.0), (1.0, 0.7)))  # of 1 and 4 rows
    assert found.speeds_for(2) == pytest.approx([1.4, 0.9])
    assert found.speeds_for(0.5) == [1.6, 1.0]
    assert found.speeds_for(64) == [1.0, 0.7]


@pytest.mark.parametrize(("memory", "count"), [(None, 3), (1e6, 3), (240.0, 2), (10.0, 1)])
def test_sizes_that_do_not_fit_in_the_memory_are_not_measured(
    memory: float | None, count: int
) -> None:
    x = torch.ones(8, 4)
    asked = Asked(nn.Sequential(nn.Linear(4, 4)), x, F.mse_loss, "cpu:1", x, memory=memory)
    activation = tuple(tuple(10.0 * rows for _ in range(3)) for rows in (1, 4, 8))
    # One device has one microbatch in flight: 3 * (40 + 10 * rows) bytes.
    assert that_fit(asked, activation, [40.0] * 3) == count


@pytest.mark.parametrize(("rows", "measured"), [((4,), (-3.0,)), ((1, 4), (-3.0, -1.0))])
def test_a_hand_over_takes_no_time_less_than_none(
    rows: tuple[int, ...], measured: tuple[float, ...]
) -> None:
    found = measurements([1.0], rows=rows, handover_ns=measured)
    assert found.handed_ns(4) == 0.0


def test_hand_overs_are_those_of_the_size() -> None:
    assert measurements([1.0], handover_ns=(10.0, 40.0)).handed_ns(2) == pytest.approx(20.0)


def test_a_hand_over_takes_its_usual_time() -> None:
    assert _usual([10.0] * 8 + [20.0, 1000.0]) == pytest.approx(100 / 9)
    assert _usual([7.0]) == 7.0
    assert _usual([]) == 0.0
