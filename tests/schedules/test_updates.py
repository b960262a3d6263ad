"""PipeDream and its double-buffered variant: which weights each forward reads."""

import itertools

import pytest

from pykern import schedules
from pykern.plan import (
    Action,
    Kind,
    Placement,
    Plan,
    PlanError,
    by_slots,
    weight_versions,
    with_updates,
)

SIZES = [(1, 5), (2, 8), (3, 7), (4, 16), (5, 23), (8, 64)]


def versions_read(plan: Plan) -> dict[tuple[int, int], int]:
    """How many updates of its stage stand before the forward of each stage and microbatch."""
    read: dict[tuple[int, int], int] = {}
    for row in plan.rows:
        for position, action in enumerate(row):
            if action.kind is Kind.F:
                before = row[:position]
                updates = [a for a in before if a.kind is Kind.U and a.stage == action.stage]
                read[action.stage, action.microbatch] = len(updates)
    return read


@pytest.mark.parametrize(("num_devices", "num_microbatches"), SIZES)
def test_pipedreams_forwards_read_what_was_last_written(
    num_devices: int, num_microbatches: int
) -> None:
    plan = schedules.pipedream(num_devices, num_microbatches)
    for (stage, microbatch), version in versions_read(plan).items():
        assert version == max(microbatch - (num_devices - 1 - stage), 0)
    for row in plan.rows:
        for action, following in itertools.pairwise(row):
            if action.kind is Kind.B:
                assert following == Action(Kind.U, action.stage, action.microbatch)


@pytest.mark.parametrize(("num_devices", "num_microbatches"), SIZES)
@pytest.mark.parametrize("larger", [0, 1, 5])
def test_a_group_of_2bw_reads_the_weights_of_one_step_ago_on_every_stage(
    num_devices: int, num_microbatches: int, larger: int
) -> None:
    group = num_devices + larger
    plan = schedules.pipedream_2bw(num_devices, num_microbatches, group)
    for (_, microbatch), version in versions_read(plan).items():
        assert version == max(microbatch // group - 1, 0)
    assert max(weight_versions(plan)) <= 2
    ends = [min(m + group, num_microbatches) - 1 for m in range(0, num_microbatches, group)]
    for stage, row in enumerate(plan.rows):
        assert [a for a in row if a.kind is Kind.U] == [Action(Kind.U, stage, m) for m in ends]


def test_updates_change_nothing_else() -> None:
    plan = schedules.one_f_one_b(4, 12)
    for updated in (schedules.pipedream(4, 12), schedules.pipedream_2bw(4, 12)):
        rows = [tuple(a for a in row if a.kind is not Kind.U) for row in updated.rows]
        assert tuple(rows) == plan.rows


def test_updates_follow_the_last_part_of_a_split_backward_and_its_last_slice() -> None:
    text = str(with_updates(schedules.zb_h1(1, 2), group=1, delay=0))
    assert text == "device 0 | 0F0 0I0 0W0 0U0 0F1 0I1 0W1 0U1"
    sliced = by_slots(Placement.linear(1), 2, group=1, group_offset=4, num_slices=2)
    row = with_updates(sliced, group=2, delay=0).rows[0]
    assert " ".join(map(str, row)) == "0F0 0F0.1 0B0.1 0F1 0B0 0F1.1 0B1.1 0B1 0U1"
    words = "0F0 0F0.1 0I0.1 0I0 0W0 0W0.1 0F1 0F1.1 0I1.1 0W1.1 0I1 0W1"
    split = Plan(Placement.linear(1), 2, [list(map(Action.parse, words.split()))], num_slices=2)
    row = with_updates(split, group=1, delay=0).rows[0]
    assert " ".join(map(str, row)) == words.replace("0W0.1", "0W0.1 0U0") + " 0U1"


def test_a_plan_without_updates_holds_one_version() -> None:
    assert weight_versions(schedules.interleaved(2, 6)) == [1] * 4


def test_updates_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="must have one replica"):
        with_updates(schedules.chimera(2, 4), group=1, delay=0)
    with pytest.raises(ValueError, match="no updates to add them"):
        with_updates(schedules.pipedream(2, 4), group=1, delay=0)
    with pytest.raises(ValueError, match="group must be 1 to"):
        with_updates(schedules.gpipe(2, 4), group=0, delay=0)
    with pytest.raises(ValueError, match="delay must be 0 to"):
        with_updates(schedules.gpipe(2, 4), group=1, delay=-1)
    # All forwards come first, and the third group's want the first group's gradients.
    with pytest.raises(PlanError, match="P006"):
        with_updates(schedules.gpipe(2, 6), group=2, delay=2)
