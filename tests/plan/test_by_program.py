"""Plans written out as patterns: what the words mean and what is refused."""

import time

import pytest

from pykern.plan import Placement, PlanError, by_program

ONE = Placement(1, [0, 0])


def test_words_take_the_next_microbatch_of_their_chunk() -> None:
    plan = by_program(ONE, 2, [[(2, "F0 F1"), (1, "B1 I1"), (1, "I0 W1 B0"), (1, "W0")]])
    assert str(plan) == "device 0 | 0F0 1F0 0F1 1F1 1B0 1I1 0I0 1W1 0B1 0W0"


def test_a_weight_of_any_chunk_is_the_oldest_that_waits() -> None:
    plan = by_program(ONE, 2, [[(2, "F0 F1"), (2, "I1 I0"), (4, "W")]])
    assert str(plan).endswith("1I0 0I0 1I1 0I1 1W0 0W0 1W1 0W1")


def test_words_beyond_the_last_microbatch_stand_for_nothing() -> None:
    plan = by_program(ONE, 1, [[(3, "F0 F1 W"), (3, "I1 I0 W W1")]])
    assert str(plan) == "device 0 | 0F0 1F0 1I0 0I0 1W0 0W0"


def test_phases_that_write_nothing_more_take_no_time() -> None:
    start = time.perf_counter()
    plan = by_program(ONE, 1, [[*[(2**24, "F0 F1")] * 20, (1, "B1 B0")]])
    assert time.perf_counter() - start < 1
    assert plan.num_actions == 4


def test_pairs_share_a_slot_where_both_are_there() -> None:
    plan = by_program(ONE, 2, [[(1, "F0 F1"), (1, "F0&B1 F1 F0&B1"), (2, "B0")]])
    assert plan.overlaps == ((2,),)
    assert str(plan.rows[0][2]) == "0F1"
    assert str(plan.rows[0][3]) == "1B0"


@pytest.mark.parametrize("word", ["F2", "F", "f0", "U0", "0F", "F0&", "&", "F-1", "F0&B0&B1"])
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(
        ValueError, match="a pattern's word must be F, B, I or W and a chunk, 0 to 1"
    ):
        by_program(ONE, 2, [[(1, f"F0 {word}")]])


def test_bad_numbers_and_bad_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="number of programs must be 1 to 1, got 2"):
        by_program(ONE, 2, [[], []])
    with pytest.raises(ValueError, match="times of a phase must be 0 to 16777216, got -1"):
        by_program(ONE, 2, [[(-1, "F0")]])
    with pytest.raises(ValueError, match="num_microbatches must be"):
        by_program(ONE, 0, [[]])
    with pytest.raises(PlanError, match="P005"):
        by_program(ONE, 2, [[(1, "F0 F1 B1 B0")]])
    with pytest.raises(PlanError, match="P006"):
        by_program(ONE, 1, [[(1, "F1 F0 B1 B0")]])
