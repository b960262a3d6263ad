"""The copies of a plan: what they are, that they can run, and which are refused."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.plan import (
    Action,
    Copy,
    Kind,
    Lane,
    LoweredPlan,
    Placement,
    Plan,
    PlanError,
    Ring,
    by_phases,
    by_slots,
    check_lowered,
    lower,
)
from tests.plan.oracle import Oracle, full_plans
from tests.support.plans import parsed


def written(lowered: LoweredPlan) -> dict[tuple[int, int], str]:
    """Each lane as text: action:slot, and after a bar what frees the slot."""

    def text(copy: Copy) -> str:
        return f"{copy.action}:{copy.slot}" + (f"|{copy.freed_by}" if copy.freed_by else "")

    return {
        (lane.sender, lane.receiver): " ".join(map(text, lane.copies)) for lane in lowered.lanes
    }


def test_copies_of_1f1b_by_hand() -> None:
    # device 0 | 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    # device 1 | 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    lowered = lower(by_slots(Placement.linear(2), 4, group=1, group_offset=2))
    assert written(lowered) == {
        (0, 1): "0COPY_F0:0 0COPY_F1:1 0COPY_F2:0|1B0 0COPY_F3:1|1B1",
        (1, 0): "1COPY_B0:0 1COPY_B1:1 1COPY_B2:0 1COPY_B3:1",
    }
    assert lowered.rings() == [
        Ring(stage=0, replica=0, device=0, num_slots=2),
        Ring(stage=1, replica=0, device=1, num_slots=2),
    ]


def test_slots_are_held_to_the_end_of_w() -> None:
    rows = ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]
    actions = parsed(rows)
    # When 1F2 is next but one, at 1W0, neither 1W0 nor 1W1 has ended.
    assert written(lower(Plan(Placement.linear(2), 3, actions)))[0, 1] == (
        "0COPY_F0:0 0COPY_F1:1 0COPY_F2:2"
    )


def test_the_slot_of_a_recomputed_cell_keeps_the_input_of_r() -> None:
    rows = ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1R0 1B0 1F2 1R1 1B1 1B2"]
    actions = parsed(rows)
    lowered = lower(Plan(Placement.linear(2), 3, actions))
    assert written(lowered)[0, 1] == "0COPY_F0:0 0COPY_F1:1 0COPY_F2:2"
    # 1F0 has read what it needs, but 1R0 reads it again.
    for early in ("1F0", "1R0"):
        copies = list(lowered.lanes[0].copies)
        copies[2] = Copy(copies[2].action, 0, Action.parse(early))
        with pytest.raises(PlanError, match=r"P011.*which this action frees"):
            check_lowered(LoweredPlan(lowered.plan, [Lane(0, 1, copies), lowered.lanes[1]]))


def test_without_backwards_the_forward_frees_its_slot() -> None:
    plan = by_slots(Placement.linear(2), 4, group=1, group_offset=2).forward_only()
    assert written(lower(plan)) == {
        (0, 1): "0COPY_F0:0 0COPY_F1:1 0COPY_F2:0|1F0 0COPY_F3:1|1F1",
        (1, 0): "",
    }


def test_no_copy_waits_for_what_runs_behind_the_reader_of_a_later_one() -> None:
    rows = ["0F1 0F4 0F0 0F2 0F3", "1F0 1F1 1F2 1F3 1F4"]
    actions = parsed(rows)
    lowered = lower(Plan(Placement.linear(2), 5, actions))
    assert written(lowered)[0, 1] == (
        "0COPY_F1:0 0COPY_F4:1 0COPY_F0:2 0COPY_F2:2|1F0 0COPY_F3:0|1F1"
    )
    # 1F4 is far away and could take the slot that 1F1 frees, but 1F0 waits for the copy behind it.
    copies = list(lowered.lanes[0].copies)
    copies[1] = Copy(copies[1].action, 0, Action.parse("1F1"))
    with pytest.raises(PlanError, match="P011"):
        check_lowered(LoweredPlan(lowered.plan, [Lane(0, 1, copies), lowered.lanes[1]]))


def test_what_stays_on_a_device_is_no_copy() -> None:
    lowered = lower(by_phases(Placement(1, [0, 0]), 2, [4], 2))
    assert lowered.lanes == ()
    assert [ring.num_slots for ring in lowered.rings()] == [2, 2]


def runs_by_trial(lowered: LoweredPlan, rng: random.Random) -> None:
    """Rows and lanes take their next item in random turns; no slot is overwritten in use."""
    plan, oracle = lowered.plan, Oracle(lowered.plan)
    copy_of = {c.action: c for lane in lowered.lanes for c in lane.copies}
    holder: dict[tuple[object, ...], Action] = {}
    ran: set[Action] = set()
    queues = [("row", list(row)) for row in plan.rows]
    queues += [("lane", [c.action for c in lane.copies]) for lane in lowered.lanes]

    def source(copy: Action) -> Action:
        kinds = [Kind.F] if copy.kind is Kind.COPY_F else [Kind.B, Kind.I]
        actions = [Action(k, copy.stage, copy.microbatch, copy.slice) for k in kinds]
        return next(a for a in actions if a in oracle.place)

    def needs(action: Action) -> set[Action]:
        if action in copy_of:
            freed_by = copy_of[action].freed_by
            return {source(action), *([freed_by] if freed_by else [])}
        slot = oracle.slot(action)
        wanted = {n for a in slot for n in oracle.needs(a)} - set(slot)
        arrives = {COPY[a.kind]: a for a in wanted if oracle.link(a) and a.stage != action.stage}
        return wanted | {Action(k, a.stage, a.microbatch, a.slice) for k, a in arrives.items()}

    while any(queue for _, queue in queues):
        ready = [(kind, q) for kind, q in queues if q and ran.issuperset(needs(q[0]))]
        assert ready, "deadlock"
        kind, queue = rng.choice(ready)
        action = queue[0]
        done = (action,) if kind == "lane" else oracle.slot(action)
        if kind == "lane":
            replica = action.microbatch % plan.placement.num_replicas
            slot = (action.kind, action.stage, replica, copy_of[action].slot)
            assert slot not in holder or last_use(oracle, holder[slot]) in ran
            holder[slot] = action
        ran.update(done)
        del queue[: len(done)]


COPY = {Kind.F: Kind.COPY_F, Kind.B: Kind.COPY_B, Kind.I: Kind.COPY_B}


def last_use(oracle: Oracle, copy: Action) -> Action:
    """The action whose end frees the slot of a copy, or of the cell of an F."""
    stage = copy.stage + {Kind.COPY_F: 1, Kind.COPY_B: -1}.get(copy.kind, 0)
    cell = stage, copy.microbatch, copy.slice
    found = [Action(k, *cell) for k in (Kind.W, Kind.B, Kind.F)]
    return next(a for a in found if a in oracle.place)


@given(full_plans(), st.randoms(use_true_random=False))
def test_copies_of_any_plan_run_in_any_order(plan: Plan, rng: random.Random) -> None:
    lowered = lower(plan)
    check_lowered(lowered)
    runs_by_trial(lowered, rng)


@given(full_plans())
def test_rings_are_as_small_as_the_prefetch_allows(plan: Plan) -> None:
    lowered, oracle = lower(plan), Oracle(plan)
    uses: list[tuple[int, int, tuple[int, int]]] = []
    for lane in lowered.lanes:
        uses += uses_of(oracle, [copy.action for copy in lane.copies])
    brought = {ring for _, _, ring in uses}
    for row in plan.rows:
        for position, action in enumerate(row):
            ring = action.stage, action.microbatch % plan.placement.num_replicas
            if action.kind is Kind.F and ring not in brought:
                start = oracle.place[oracle.slot(action)[0]][1]
                assert start in (position, position - 1)
                uses.append((start, oracle.place[last_use(oracle, action)][1], ring))
    most: Counter[tuple[int, int]] = Counter()
    for start, _, ring in uses:
        in_use = [1 for first, last, other in uses if other == ring and first <= start <= last]
        most[ring] = max(most[ring], len(in_use))
    # A replica without microbatches needs none.
    assert {(r.stage, r.replica): r.num_slots for r in lowered.rings() if r.num_slots} == most


@given(full_plans())
def test_a_gradient_lands_in_the_slot_of_its_microbatch(plan: Plan) -> None:
    copies = [copy for lane in lower(plan).lanes for copy in lane.copies]
    # The cell that a copy is for: the stage after the sender's, or the one before.
    inputs = {
        (c.action.stage + 1, c.action.microbatch, c.action.slice): c.slot
        for c in copies
        if c.action.kind is Kind.COPY_F
    }
    for copy in copies:
        if copy.action.kind is Kind.COPY_B:
            cell = copy.action.stage - 1, copy.action.microbatch, copy.action.slice
            assert copy.freed_by is None
            assert inputs.get(cell, copy.slot) == copy.slot


def uses_of(oracle: Oracle, copies: list[Action]) -> list[tuple[int, int, tuple[int, int]]]:
    """First and last position of the receiver's row at which the slot of each input is in use."""
    uses: list[tuple[int, int, tuple[int, int]]] = []
    earliest = 1 << 30
    for copy in reversed(copies):
        stage = copy.stage + (1 if copy.kind is Kind.COPY_F else -1)
        kinds = [Kind.F] if copy.kind is Kind.COPY_F else [Kind.B, Kind.I]
        actions = [Action(k, stage, copy.microbatch, copy.slice) for k in kinds]
        reader = next(a for a in actions if a in oracle.place)
        ahead = oracle.before(reader)
        start = oracle.place[oracle.slot(ahead)[0]][1] if ahead else 0
        earliest = min(earliest, start)
        replica = copy.microbatch % oracle.plan.placement.num_replicas
        end = oracle.place[last_use(oracle, copy)][1]
        if copy.kind is Kind.COPY_F:
            uses.append((earliest, end, (stage, replica)))
    return uses


def changed(change: Callable[[list[Copy]], object], lane: int = 0) -> LoweredPlan:
    """1F1B on two devices with one lane changed."""
    lowered = lower(by_slots(Placement.linear(2), 4, group=1, group_offset=2))
    lanes = list(lowered.lanes)
    copies = list(lanes[lane].copies)
    change(copies)
    lanes[lane] = Lane(lanes[lane].sender, lanes[lane].receiver, copies)
    return LoweredPlan(lowered.plan, lanes)


def replaced(index: int, slot: int, freed_by: str | None) -> LoweredPlan:
    def change(copies: list[Copy]) -> None:
        action = Action.parse(freed_by) if freed_by else None
        copies[index] = Copy(copies[index].action, slot, action)

    return changed(change)


@pytest.mark.parametrize(
    ("wrong", "device", "position", "message"),
    [
        (replaced(2, 0, None), 1, 1, "0COPY_F2 takes slot 0 of its ring, which this action frees"),
        (replaced(2, 0, "1F0"), 1, 1, "which this action frees, and does not wait for it"),
        (replaced(2, 0, "1B1"), 1, 3, "waits for this action, but may be needed from position 3"),
        (replaced(1, 0, "1B0"), 1, 1, "may be needed from position 1 on"),
        (replaced(2, 0, "0B0"), 1, 0, "waits for 0B0, which this device does not run"),
        (replaced(2, 0, "9B0"), 1, 0, "waits for 9B0, which this device does not run"),
        (replaced(2, 0, "1B99"), 1, 0, "waits for 1B99, which this device does not run"),
        (replaced(2, 5, None), 1, 3, "slots are numbered without a gap from 0, and it has taken 2"),
        (replaced(2, -1, None), 1, 3, "takes slot -1 of its ring"),
    ],
)
def test_slots_taken_early_are_refused(
    wrong: LoweredPlan, device: int, position: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        check_lowered(wrong)
    assert (caught.value.rule, caught.value.device, caught.value.position) == (
        "P011",
        device,
        position,
    )
    with pytest.raises(PlanError, match="P011"):
        wrong.rings()


@pytest.mark.parametrize("copy", [Copy(Action.parse("1COPY_B1"), 0), None])
def test_a_gradient_that_goes_elsewhere_is_refused(copy: Copy | None) -> None:
    copy = copy or Copy(Action.parse("1COPY_B1"), 1, Action.parse("0B0"))

    def change(copies: list[Copy]) -> None:
        copies[1] = copy

    with pytest.raises(PlanError, match="1COPY_B1 goes to slot 1, where its microbatch is"):
        check_lowered(changed(change, lane=1))


def test_waiting_for_a_later_action_than_needed_is_allowed() -> None:
    lowered = lower(by_slots(Placement.linear(2), 4, group=1, group_offset=2))
    assert lowered.lanes[0].copies[3].freed_by == Action.parse("1B1")
    check_lowered(replaced(3, 1, "1F2"))
    check_lowered(replaced(2, 2, None))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (changed(lambda copies: copies.pop(1)), "holds 0COPY_F2 where 0COPY_F1 belongs"),
        (changed(lambda copies: copies.pop()), "holds nothing where 0COPY_F3 belongs"),
        (changed(lambda copies: copies.append(copies[0])), "goes on after its last copy with"),
        (changed(lambda copies: copies.reverse()), "holds 0COPY_F3 where 0COPY_F0 belongs"),
        (changed(lambda copies: copies.clear(), lane=1), "from device 1 to 0 holds nothing"),
        (LoweredPlan(changed(len).plan, []), "the lane from device 0 to 1 is missing"),
        (
            LoweredPlan(changed(len).plan, changed(len).lanes[::-1]),
            "the lane from device 0 to 1 is missing, or not in its place",
        ),
        (
            LoweredPlan(changed(len).plan, [*changed(len).lanes, Lane(1, 1, [])]),
            "the lane from device 1 to 1 has nothing to carry",
        ),
    ],
)
def test_lanes_that_are_not_those_of_the_plan_are_refused(wrong: LoweredPlan, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        check_lowered(wrong)
    assert caught.value.rule == "P005"


def test_only_plans_that_can_run_are_lowered() -> None:
    plan = by_slots(Placement.linear(2), 2, group=1, group_offset=2)
    stuck = Plan(plan.placement, 2, [row[::-1] for row in plan.rows])
    with pytest.raises(PlanError, match="P006"):
        lower(stuck)
    with pytest.raises(PlanError, match="P006"):
        check_lowered(LoweredPlan(stuck, []))
