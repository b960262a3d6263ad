"""Torch's CSV in both directions: what it writes is read, what is written says the same plan."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import _ComputationType
from torch.testing._internal.distributed.fake_pg import FakeStore

from pykern.plan import Action, Kind, Placement, Plan, PlanError, load_plan
from pykern.plan.files.torch_csv import from_torch_csv, to_torch_csv
from pykern.schedules import by_name, one_f_one_b
from tests.plan.strategies import valid_plans

NUM_RANKS = 4
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")

SMALL = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\r\n"
    "1RECV_F0,1F0,1B0,1RECV_F1,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD\r\n"
)
# The same, received as early as may be.
EARLY = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1,0REDUCE_GRAD\r\n"
    "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD\r\n"
)
# The same for torch 2.15 and newer.
WAITED = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0WAIT_SEND_F0,0B1,0WAIT_SEND_F1,"
    "0REDUCE_GRAD,0WAIT_REDUCE_GRAD\r\n"
    "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1,"
    "1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_B0,1WAIT_SEND_B1\r\n"
)


def sayable() -> list[str]:
    """The schedules of the catalogue that torch's file has words for."""
    plans = {name: schedule(4, 8) for name, schedule in by_name.items()}
    return [
        name
        for name, plan in plans.items()
        if plan.placement.num_replicas == plan.num_slices == 1 and not plan.has(Kind.U)
    ]


@pytest.fixture(scope="module")
def group() -> Iterator[Any]:
    """A process group in which nobody is there: enough to have torch make its plans."""
    distributed = torch.distributed
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def torch_schedule(name: str, num_microbatches: int, group: Any) -> Any:
    local = (0, 7) if name in V_SHAPED else (0, 4)
    stages = [
        pipelining.PipelineStage(torch.nn.Linear(1, 1), s, 8, torch.device("cpu"), group=group)
        for s in local
    ]
    make = getattr(pipelining, f"Schedule{name}")
    return make(stages, num_microbatches, loss_fn=lambda output, target: (output - target).sum())


def leaves(row: list[Any]) -> list[str]:
    """A row of torch's without bubbles, pairs taken apart."""
    return [str(leaf) for action in row if action for leaf in action.sub_actions or (action,)]


@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("num_microbatches", [8, 12])
@pytest.mark.parametrize("name", LOOPED + V_SHAPED)
def test_a_file_of_torch_is_its_plan(
    name: str, num_microbatches: int, form: str, group: Any, tmp_path: Path
) -> None:
    theirs = torch_schedule(name, num_microbatches, group)
    theirs._dump_csv(tmp_path / "plan.csv", format=form)
    plan = load_plan(tmp_path / "plan.csv")
    rows = [leaves(theirs.pipeline_order[rank]) for rank in range(NUM_RANKS)]
    assert [[str(action) for action in row] for row in plan.rows] == rows
    num_pairs = sum(
        bool(a and a.sub_actions) for row in theirs.pipeline_order.values() for a in row
    )
    assert sum(map(len, plan.overlaps)) == num_pairs
    assert (num_pairs > 0) == (name == "DualPipeV")


def test_a_small_plan_is_written_as_torch_writes_it() -> None:
    plan = one_f_one_b(2, 2)
    assert to_torch_csv(plan) == "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"
    assert to_torch_csv(plan, transfers=True, waits=False) == EARLY
    assert to_torch_csv(plan, transfers=True, waits=True) == WAITED
    assert from_torch_csv(WAITED) == from_torch_csv(EARLY) == from_torch_csv(SMALL) == plan


def test_the_waits_are_those_of_the_installed_torch() -> None:
    has_waits = hasattr(_ComputationType, "WAIT_SEND_F")
    expected = WAITED if has_waits else EARLY
    assert to_torch_csv(one_f_one_b(2, 2), transfers=True) == expected


def test_pairs_and_split_backwards_are_written_as_torch_writes_them() -> None:
    row = "0F0,(0F1;0B0)OVERLAP_F_B,0I1,0W1"
    plan = from_torch_csv(row)
    assert plan.overlaps == ((1,),)
    assert to_torch_csv(plan) == row + "\r\n"
    assert to_torch_csv(plan, transfers=True, waits=False) == row + ",0REDUCE_GRAD\r\n"


def test_bubbles_are_left_out() -> None:
    assert from_torch_csv(",0F0,,0B0,\r\n") == one_f_one_b(1, 1)


def actions(row: str) -> list[Action]:
    return [Action.parse(text) for text in row.split()]


TRANSFER = re.compile(r"(\d+)(SEND|RECV)_([FB])(\d+)")


def other_end(cell: str) -> str:
    """The receive of a send."""
    stage, _, kind, microbatch = re.fullmatch(TRANSFER, cell).groups()  # type: ignore[union-attr]
    return f"{int(stage) + (1 if kind == 'F' else -1)}RECV_{kind}{microbatch}"


def ends_though_sends_wait(rows: list[list[str]]) -> bool:
    """Whether the rows end where a send waits for its receive and a receive for its send."""
    rows = [list(row) for row in rows]
    progress = True
    while progress:
        progress = False
        for row in rows:
            # A send is rendered as one that waits at once, so that waits have nothing to do.
            while row and not TRANSFER.fullmatch(row[0]):
                row.pop(0)
                progress = True
            for other in rows:
                if row and other and "SEND" in row[0] and other[0] == other_end(row[0]):
                    row.pop(0)
                    other.pop(0)
                    progress = True
    return not any(rows)


def test_the_trial_sees_a_deadlock() -> None:
    assert ends_though_sends_wait([line.split(",") for line in SMALL.splitlines()])
    # Device 0 cannot get rid of 0SEND_F1, nor device 1 of 1SEND_B0.
    late = SMALL.replace("1RECV_F1,1SEND_B0", "1SEND_B0,1RECV_F1")
    assert not ends_though_sends_wait([line.split(",") for line in late.splitlines()])
    assert from_torch_csv(late) == from_torch_csv(SMALL)


@given(valid_plans())
def test_any_plan_survives_both_forms_and_ends_though_sends_wait(plan: Plan) -> None:
    assume(plan.placement.num_replicas == plan.num_slices == 1)
    assert from_torch_csv(to_torch_csv(plan)) == plan
    for waits in (False, True):
        text = to_torch_csv(plan, transfers=True, waits=waits)
        assert from_torch_csv(text) == plan
        assert ends_though_sends_wait([line.split(",") for line in text.splitlines()])


@pytest.mark.parametrize("name", sayable())
def test_every_schedule_ends_though_sends_wait(name: str) -> None:
    for num_devices, num_microbatches in ((1, 2), (2, 4), (3, 7), (4, 8), (4, 13)):
        plan = by_name[name](num_devices, num_microbatches)
        text = to_torch_csv(plan, transfers=True, waits=False)
        assert from_torch_csv(text) == plan
        assert ends_though_sends_wait([line.split(",") for line in text.splitlines()])


REFUSED = [
    ("0F0,0B0,0X0", """line 1, cell 3: a cell must be like '2F0', got '0X0'"""),
    ("0F0,\x1b[31m", r"""line 1, cell 2: a cell must be like '2F0', got '\x1b[31m'"""),
    ("0F0,0B0 ", "line 1, cell 2: a cell"),
    ("0F0,0B00", "line 1, cell 2: an action must be stage, kind, microbatch"),
    ("0F0,0B0junk", "line 1, cell 2: a cell"),
    ("0F0,0B0,0WAIT_SEND_F0", "waits must be at most 0, the number of transfers, got 1"),
    (
        "0F0,0B0,0SEND_F0",
        "line 1, cell 3: transfers must send what their device has made before, got 0SEND_F0",
    ),
    ("0F0,0B0,0RECV_F0", "line 1, cell 3: 0RECV_F0 has no reader after it"),
    ("0F0,(0B0;0F1)OVERLAP_F_B,0B1", "line 1, cell 2: a cell"),
    ("0F0,(0F1;0B0;0B1)OVERLAP_F_B", "line 1, cell 2: a cell"),
    ("0F0,0F0,0B0", "P003"),
    (
        "0F0,0B0\r\n0F1,0B1",
        "line 2, cell 1: stage 0 must be on line 1, where it began, got an action of it here",
    ),
    ("1F0,1B0", "each of 2 stages must have an action, got none for stage 0"),
    (
        "0F0,0B0,0B9999999",
        "actions must be at least one for each of 1 stages, 10000000 microbatches and 1 "
        "slices, got 3",
    ),
    ("0F0,0B0,0B99999999999", "microbatch must be 0 to 4294967295, got 99999999999"),
    ("70000F0", "stage must be 0 to 65535, got 70000"),
    ("", "num_devices must be 1 to 65536, got 0"),
    ('"0F0,0B0', "line 1: unexpected end of data"),
    ("0F0,0B0" + "\n" * 65_537, "lines must be at most 65536, one for each device, got line 65537"),
    (SMALL.replace("0SEND_F1,", ""), "line 1, cell 3: 0SEND_F1 is missing after it"),
    (SMALL.replace("1RECV_F1,", ""), "line 2, cell 5: 1F1 must have 1RECV_F1 before it, got none"),
    (
        SMALL.replace("0F1,0SEND_F1", "0SEND_F1,0F1"),
        "line 1, cell 3: transfers must send what their device has made before, got 0SEND_F1",
    ),
    (
        SMALL.replace("0SEND_F0", "0SEND_F0,0SEND_F0"),
        "line 1, cell 3: transfers must send what their device has made before, got 0SEND_F0",
    ),
    (SMALL.replace("0SEND_F0,", ""), "line 1, cell 1: 0SEND_F0 is missing after it"),
    (
        SMALL.replace("1RECV_F1,", "").replace("1RECV_F0", "1RECV_F1,1RECV_F0"),
        "line 2, cell 1: transfers must be received in the order of sending, got "
        "1RECV_F1 where 0SEND_F0 is due",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=lambda text: text[:30])
def test_what_is_no_plan_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        from_torch_csv(text)


def test_what_torch_cannot_say_is_refused() -> None:
    replicas = Plan(
        Placement.bidirectional(2), 2, [actions("0F0 1F1 1B1 0B0"), actions("0F1 1F0 1B0 0B1")]
    )
    with pytest.raises(
        ValueError, match=r"replicas of the plan must be 1 for .*, got 2; use .json"
    ):
        to_torch_csv(replicas)
    slices = Plan(Placement.linear(1), 1, [actions("0F0 0F0.1 0B0.1 0B0")], num_slices=2)
    with pytest.raises(ValueError, match=r"slices of the plan must be 1 for .*, got 2"):
        to_torch_csv(slices)
    recompute = Plan(Placement.linear(1), 1, [actions("0F0 0R0 0B0")])
    with pytest.raises(
        ValueError, match=r"actions must be F, B, I or W for .*, got 0R0 at position 1 of device 0"
    ):
        to_torch_csv(recompute)
    with pytest.raises(PlanError, match="P005"):
        to_torch_csv(Plan(Placement.linear(1), 1, [actions("0F0 0W0")]))


WORDS = st.from_regex(r"[0-3](F|B|I|W|SEND_F|WAIT_SEND_F|RECV_B|RESHARD)[0-2]?", fullmatch=True)


@given(st.data())
def test_a_damaged_file_is_refused_or_a_plan(data: st.DataObject) -> None:
    cells = re.split(r"(,|\r\n)", SMALL)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(cells) - 1))
        cells[place] = data.draw(
            st.one_of(st.sampled_from([*cells, ""]), st.text(max_size=6), WORDS), label="cell"
        )
    try:
        plan = from_torch_csv("".join(cells))
    except ValueError:
        return
    assert from_torch_csv(to_torch_csv(plan)) == plan


@given(st.text())
def test_any_text_is_refused_or_a_plan(text: str) -> None:
    try:
        from_torch_csv(text)
    except ValueError:
        return
