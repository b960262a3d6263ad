"""Plans on several blocks of devices: who runs what, how long that takes, what is refused."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pykern import schedules
from pykern.plan import (
    Action,
    Costs,
    Kind,
    Plan,
    check,
    simulate,
    with_recompute,
    with_reductions,
    with_replicas,
    with_updates,
)
from pykern.plan.shares import Shares
from tests.plan.strategies import valid_plans

SCHEDULES = sorted(schedules.by_name.keys() - {"pipedream", "pipedream_2bw"})


def block_of(plan: Plan, block: int, num_replicas: int) -> list[list[tuple[Action, bool]]]:
    """Its rows, in the numbers of one replica, each action with whether a pair begins there."""
    size = plan.num_devices // num_replicas
    devices = range(block * size, (block + 1) * size)
    return [
        [
            (
                Action(a.kind, a.stage, a.microbatch // num_replicas, a.slice),
                position in plan.overlaps[device],
            )
            for position, a in enumerate(plan.rows[device])
        ]
        for device in devices
    ]


def left(plan: Plan, num_microbatches: int) -> list[list[tuple[Action, bool]]]:
    """The plan's rows without the microbatches from that number on."""
    rows = []
    for row, starts in zip(plan.rows, plan.overlaps, strict=True):
        stays = [action.microbatch < num_microbatches for action in row]
        pairs = [position in starts and stays[position + 1] for position in range(len(row))]
        rows.append([(a, pair) for a, pair, stay in zip(row, pairs, stays, strict=True) if stay])
    return rows


@given(valid_plans(), st.integers(1, 4), st.integers(0, 3))
def test_every_block_runs_the_plan_with_its_microbatches(
    plan: Plan, num_replicas: int, fewer: int
) -> None:
    count = num_replicas * plan.num_microbatches - fewer
    assume(fewer < num_replicas <= count)
    replicated = with_replicas(plan, num_replicas, count)
    check(replicated)
    check(with_reductions(replicated))
    assert replicated.num_devices == num_replicas * plan.num_devices
    assert (replicated.num_microbatches, replicated.num_slices) == (count, plan.num_slices)
    for block in range(num_replicas):
        mine = range(block, count, num_replicas)
        assert block_of(replicated, block, num_replicas) == left(plan, len(mine))
        devices = range(block * plan.num_devices, (block + 1) * plan.num_devices)
        found = {a.microbatch for device in devices for a in replicated.rows[device]}
        assert found == set(mine)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_the_makespan_is_that_of_one_replica_and_the_reduction(
    name: str, num_replicas: int
) -> None:
    plan = schedules.by_name[name](4, 8)
    once = simulate(plan, Costs(1, 2)).makespan_ns
    for count in range(7 * num_replicas + 1, 8 * num_replicas + 1):
        replicated = with_replicas(plan, num_replicas, count)
        assert simulate(replicated, Costs(1, 2)).makespan_ns == once
        if plan.has(Kind.B) or plan.has(Kind.W):
            reduced = simulate(with_reductions(replicated), Costs(1, 2, reduce_ns=0.5))
            one_stage_a_device = plan.placement.num_replicas == 1 and plan.num_stages == 4
            most = 0.5 if one_stage_a_device else 0.5 * plan.num_stages
            assert once + 0.5 <= reduced.makespan_ns <= once + most


def test_uneven_shares_take_no_longer_than_the_schedule_for_fewer() -> None:
    """Without the actions that a block leaves out, its rows are the schedule's for one microbatch
    less."""
    for name in ("gpipe", "one_f_one_b", "zb_h1"):
        schedule = schedules.by_name[name]
        uneven = with_replicas(schedule(4, 8), 2, 15)
        assert block_of(uneven, 1, 2) == left(schedule(4, 7), 7), name


def test_recompute_may_come_before_or_after() -> None:
    plan = schedules.one_f_one_b(2, 3)
    cells = [Action(Kind.R, stage, m) for stage in range(2) for m in range(3)]
    all_cells = [Action(Kind.R, stage, m) for stage in range(2) for m in range(6)]
    costs = Costs(1, 2)
    before = with_replicas(with_recompute(plan, cells, costs), 2)
    assert before == with_recompute(with_replicas(plan, 2), all_cells, costs)
    assert before.has(Kind.R)


def test_what_stands_once_for_a_stage_is_refused() -> None:
    chimera = schedules.chimera(2, 2)
    assert with_replicas(chimera, 2).placement.num_replicas == 4
    for plan in (with_reductions(chimera), with_updates(schedules.gpipe(2, 2), 1, 0)):
        with pytest.raises(
            ValueError, match="plan must have neither REDUCE nor U to be replicated"
        ):
            with_replicas(plan, 2)


@pytest.mark.parametrize("count", [0, 1, 2, 5, -(10**18), 10**18])
def test_microbatches_that_no_block_has_are_refused(count: int) -> None:
    with pytest.raises(
        ValueError, match=f"must be 3 to 4 for 2 replicas of a plan of 2, got {count}"
    ):
        with_replicas(schedules.gpipe(2, 2), 2, count)


def test_shares_are_those_of_the_largest() -> None:
    shares = Shares(6, 7, 3)
    assert (shares.devices_of_one, shares.microbatches_of_one) == (2, 3)
    assert shares.whose == " for each of 3 replicas"
    plan = schedules.gpipe(2, 3)
    assert shares.side_by_side(plan) == with_replicas(plan, 3, 7)
    assert Shares(6, None, 3).side_by_side(plan) == with_replicas(plan, 3, 9)
    assert Shares(6, None, 3).microbatches_of_one is None
    assert (Shares(6, 7).whose, Shares(2, 3).side_by_side(plan)) == ("", plan)


@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ((4, 8, 3), ValueError, "devices must be a multiple of replicas, 3, got 4"),
        ((4, 3, 4), ValueError, "microbatches must be at least replicas, 4, got 3"),
        ((4, 8, 0), ValueError, "replicas must be 1 to 16777216, got 0"),
        ((4, 8, True), TypeError, "replicas must be an int, got True"),
        ((4, 8.0, 2), TypeError, "microbatches must be an int, got 8.0"),
    ],
)
def test_shares_that_are_none_are_refused(
    counts: tuple[int, int, int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Shares(*counts)
