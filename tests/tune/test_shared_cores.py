"""Devices that share cores, and those that have one each as in the simulator."""

import pytest

from pykern.plan import Costs, Plan, Timeline, simulate
from pykern.plan.costs import changed
from pykern.plan.shares import Shares
from pykern.schedules import by_name
from pykern.tuning.shared_cores import lost_ns, simulate_shared, speeds_seen

PLANS = {
    "one_f_one_b": by_name["one_f_one_b"](4, 8),
    "zb_v": by_name["zb_v"](4, 8),
    "hanayo": by_name["hanayo"](4, 8, waves=2),
    "chimera": by_name["chimera"](4, 8),
    "replicas": Shares(4, 8, 2).side_by_side(by_name["gpipe"](2, 4)),
}


def costs(plan: Plan) -> Costs:
    stages = range(plan.num_stages)
    return Costs(
        [1 + 0.1 * stage for stage in stages],
        [2 + 0.1 * stage for stage in stages],
        0.3,
        overhead_ns=0.05,
        reduce_ns=0.2,
    )


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_with_a_core_each_it_is_the_simulators_timeline(plan: Plan) -> None:
    known, found = simulate(plan, costs(plan)), simulate_shared(plan, costs(plan), [1.0] * 4)
    for row, expected in zip(found.rows, known.rows, strict=True):
        assert [span.action for span in row] == [span.action for span in expected]
        assert [span.end_ns for span in row] == pytest.approx([span.end_ns for span in expected])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_on_one_core_nothing_is_faster_than_all_work(plan: Plan) -> None:
    alone = simulate(plan, costs(plan))
    work = sum(alone.busy_ns(device) for device in range(plan.num_devices))
    found = simulate_shared(plan, costs(plan), [1.0]).makespan_ns
    assert work - 1e-6 <= found <= work + alone.makespan_ns


def test_two_on_one_core_take_twice_as_long() -> None:
    plan = Shares(2, 2, 2).side_by_side(by_name["forward_only"](1, 1))
    found = simulate_shared(plan, Costs(5.0, 0.0), [1.0])
    assert [span.end_ns for row in found.rows for span in row] == [10.0, 10.0]


def test_one_that_computes_alone_is_faster() -> None:
    plan = by_name["forward_only"](2, 2)
    # The first F and the last have nothing beside them; the two in the middle run together.
    found = simulate_shared(plan, Costs(6.0, 0.0), [1.5, 1.0])
    assert found.makespan_ns == pytest.approx(4.0 + 6.0 + 4.0)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_speeds_are_found_from_timelines(plan: Plan) -> None:
    """A step that was simulated with some speeds gives them back."""
    # Three devices do twice the work of one, four do 2.1 times as much.
    given = [1.2, 1.0, 2.05 / 3, 2.1 / 4]
    timeline = simulate_shared(plan, costs(plan), given)
    work = sum(simulate(plan, costs(plan)).busy_ns(device) for device in range(plan.num_devices))
    found = speeds_seen([timeline], [work], given[:2])
    assert found == pytest.approx(given)


def test_speeds_of_devices_that_never_compute_together() -> None:
    plan = by_name["forward_only"](2, 1)
    alone = simulate(plan, Costs(5.0, 0.0))
    assert speeds_seen([alone], [10.0], [1.3]) == pytest.approx([1.3, 0.65])


def test_a_step_that_was_held_up_gives_no_impossible_speed() -> None:
    plan = Shares(2, 2, 2).side_by_side(by_name["forward_only"](1, 1))
    quick, slow = (Timeline(simulate(plan, Costs(time, 0.0)).rows) for time in (1.0, 100.0))
    assert speeds_seen([quick], [20.0], [1.0]) == [1.0, 1.0]
    assert speeds_seen([slow], [20.0], [1.0]) == pytest.approx([1.0, 0.5])


@pytest.mark.parametrize("lost", [0.0, 0.25])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_what_actions_lose_on_crowded_cores_is_found_from_timelines(
    plan: Plan, lost: float
) -> None:
    """A step that was simulated with a loss gives it back."""
    speeds, of_plan = [1.2, 1.0], costs(plan)
    work = sum(simulate(plan, of_plan).busy_ns(device) for device in range(plan.num_devices))
    slower = changed(of_plan, overhead_ns=of_plan.overhead_ns + lost)
    found = lost_ns(simulate_shared(plan, slower, speeds), work, speeds)
    assert found == pytest.approx(lost, abs=1e-9)
