"""Where sends and receives stand: none of them waits for one that is not needed yet."""

import random
import re
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import _Action, _add_send_recv

from pykern.plan import Action, Costs, Kind, Placement, Plan, check, simulate
from pykern.plan.files.torch_csv import PER_STAGE, from_torch_csv, parse, to_torch_csv
from pykern.plan.files.torch_rows import rows_with_transfers
from pykern.plan.files.transfers import ORDER_COSTS, Message, Transfer, with_transfers
from pykern.schedules import by_name, hanayo, interleaved, zb_v
from pykern.search import auto
from tests.plan.strategies import plans_for_torch, random_plan_for_torch
from tests.plan.transfer_rules import Rows, expect_runnable
from tests.plan.transfer_streams import Streams, unit_cost

UNIT = Costs(1, 2)


def makespan(plan: Plan, rows: list[list[str]], transfer_ns: float = 0, **options: bool) -> float:
    by_pair = options.get("by_pair", False)
    return Streams(rows, plan.placement, unit_cost, transfer_ns, by_pair=by_pair).makespan()


def predicted(plan: Plan, costs: Costs) -> float:
    return max(span.end_ns for row in simulate(plan, costs).rows for span in row)


def lowered_by_torch(plan: Plan) -> list[list[str]]:
    rows = {rank: [_Action.from_str(str(a)) for a in row] for rank, row in enumerate(plan.rows)}
    lowered = _add_send_recv(rows, plan.placement.device_of, plan.num_stages)
    return [[str(action) for action in lowered[rank]] for rank in range(plan.num_devices)]


def expect_kept(plan: Plan, costs: Costs) -> None:
    for messages_by in (ORDER_COSTS, costs):
        expect_runnable(rows_with_transfers(plan, messages_by, waits=False))
        expect_runnable(rows_with_transfers(plan.forward_only(), messages_by, waits=False))
    assert from_torch_csv(to_torch_csv(plan, transfers=True)) == plan


def expect_random_plans_kept(count: int) -> None:
    rng = random.Random(11)
    for _ in range(count):
        plan = random_plan_for_torch(rng, rng.randint(2, 4))
        check(plan)
        times = [rng.choices(range(3), k=plan.num_stages) for _ in range(4)]
        expect_kept(plan, Costs(times[0], times[1], input_ns=times[2], weight_ns=times[3]))


def test_any_plan_gives_rows_that_match_end_and_are_read_back() -> None:
    expect_random_plans_kept(50)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_many_plans_give_rows_that_match_end_and_are_read_back() -> None:
    expect_random_plans_kept(20_000)


# A pair whose forward and backward both go to the other device, which needs the gradient first.
CROSSED = Plan(
    Placement(2, [1, 0, 1]),
    2,
    [
        list(map(Action.parse, ["1F0", "1F1", "1B0", "1B1"])),
        list(map(Action.parse, ["0F0", "0F1", "2F0", "2B0", "0B0", "2F1", "2B1", "0B1"])),
    ],
    1,
    [[1], []],
)


def test_a_pair_sends_what_is_read_first_first() -> None:
    rows = rows_with_transfers(CROSSED, waits=False)
    expect_runnable(rows)
    pair = rows[0].index("(1F1;1B0)OVERLAP_F_B")
    sent = [cell for cell in rows[0][pair:] if "SEND" in cell][:2]
    assert sent == ["1SEND_B0", "1SEND_F1"]


def test_the_rules_see_swapped_ends_and_rows_that_wait_for_each_other() -> None:
    rows = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]
    with pytest.raises(AssertionError, match="wait for each other"):
        expect_runnable(rows)
    rows[0] = ["0F0", "0SEND_F0", "0F1", "0RECV_B0", "0SEND_F1", "0B0", "0RECV_B1", "0B1"]
    expect_runnable(rows)
    rows[1][:5] = ["1RECV_F1", "1RECV_F0", "1F0", "1B0", "1SEND_B0"]
    with pytest.raises(AssertionError):
        Rows(rows).expect_matched()
    with pytest.raises(AssertionError, match="receives"):
        Rows(rows).expect_no_deadlock(batched=True)
    with pytest.raises(AssertionError, match="lacks"):
        Rows([["0F0", "0SEND_F0"], ["1F0", "1RECV_F0"]]).expect_computable()
    with pytest.raises(AssertionError, match="not made"):
        Rows([["0SEND_F0", "0F0"], ["1RECV_F0", "1F0"]]).expect_computable()


@given(plans_for_torch(), st.data())
def test_transfers_that_take_no_time_cost_none(plan: Plan, data: st.DataObject) -> None:
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    of_stages = st.lists(st.integers(0, 4), min_size=plan.num_stages, max_size=plan.num_stages)
    times = {kind: data.draw(of_stages) for kind in kinds}
    costs = Costs(times[Kind.F], times[Kind.B], input_ns=times[Kind.I], weight_ns=times[Kind.W])

    def cost_of(action: Action) -> float:
        return times[action.kind][action.stage]

    rows = rows_with_transfers(plan, costs, waits=False)
    for by_pair in (False, True):
        streams = Streams(rows, plan.placement, cost_of, 0, by_pair=by_pair)
        assert streams.makespan() == predicted(plan, costs)


@given(plans_for_torch())
def test_each_send_has_one_wait_behind_it(plan: Plan) -> None:
    """A plan that ends though sends wait at once, ends where they wait later."""
    plain = rows_with_transfers(plan, waits=False)
    for bare, row in zip(plain, rows_with_transfers(plan, waits=True), strict=True):
        assert [cell for cell in row if "WAIT" not in cell] == bare
        ends = [cell.replace("WAIT_", "") for cell in row if "WAIT" in cell]
        waited = [cell for cell in bare if "SEND" in cell or "REDUCE" in cell]
        assert sorted(ends) == sorted(waited)
        for begun in waited:
            end = re.sub("(SEND|REDUCE)", r"WAIT_\1", begun)
            assert row.index(begun) < row.index(end)


@given(plans_for_torch())
def test_transfers_stand_in_one_order_and_as_early_as_it_lets_them(plan: Plan) -> None:
    order_of_pair: dict[frozenset[int], list[list[Message]]] = defaultdict(list)
    for device, row in enumerate(with_transfers(plan)):
        for before, item in pairwise([None, *row]):
            if isinstance(item, Transfer) and not item.sends:
                assert before is None or isinstance(before, Transfer)
        found: dict[frozenset[int], list[Message]] = defaultdict(list)
        for item in row:
            if isinstance(item, Transfer):
                stages = item.message.stage, item.message.reader
                found[frozenset(map(plan.placement.device_of, stages))].append(item.message)
        for pair, messages in found.items():
            assert device in pair
            order_of_pair[pair].append(messages)
    for one, other in order_of_pair.values():
        assert one == other


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "hanayo", "zb_h1", "zb_v"])
@pytest.mark.parametrize("transfer_ns", [0, 0.25])
def test_no_schedule_is_slower_than_by_torchs_order(name: str, transfer_ns: float) -> None:
    plan = by_name[name](4, 8)
    for by_pair in (False, True):
        ours, theirs = (
            makespan(plan, rows, transfer_ns, by_pair=by_pair)
            for rows in (rows_with_transfers(plan, waits=False), lowered_by_torch(plan))
        )
        assert ours <= theirs
        assert transfer_ns > 0 or ours == predicted(plan, UNIT)


# The searched plan, interleaved 1F1B, ZB-V and Hanayo's of two waves, as bench/README.md has them.
@pytest.mark.parametrize(
    ("num_devices", "ours", "by_torch"),
    [(4, [99, 57, 51, 114], [127, 67, 55, 114]), (8, [199, 117, 103, 234], [348, 168, 115, 234])],
)
def test_torchs_order_holds_up_plans_where_transfers_share_a_stream(
    num_devices: int, ours: list[float], by_torch: list[float]
) -> None:
    count = 2 * num_devices
    plans = [
        auto(num_devices, count, budget_ms=30).plan,
        interleaved(num_devices, count),
        zb_v(num_devices, count),
        hanayo(num_devices, count, waves=2),
    ]
    assert [predicted(plan, UNIT) for plan in plans] == ours
    assert [makespan(plan, rows_with_transfers(plan, waits=False)) for plan in plans] == ours
    lowered = [lowered_by_torch(plan) for plan in plans]
    assert list(map(makespan, plans, lowered)) == by_torch
    pairs = [makespan(p, rows, by_pair=True) for p, rows in zip(plans, lowered, strict=True)]
    assert pairs == ours


def test_the_streams_see_an_order_that_holds_up_and_one_that_never_ends() -> None:
    plan = by_name["one_f_one_b"](2, 2)
    early, late = rows_with_transfers(plan, waits=False)
    assert makespan(plan, [early, late]) == predicted(plan, UNIT) == 9
    # Device 1 takes the second microbatch only when it has sent the gradient of the last.
    swapped = [cell for cell in late if cell != "1RECV_F1"]
    swapped.insert(swapped.index("1SEND_B0") + 1, "1RECV_F1")
    assert makespan(plan, [early, swapped]) == float("inf")
    assert all(PER_STAGE.fullmatch(cell) or parse(cell) for cell in swapped)
