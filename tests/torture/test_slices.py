"""A part of each campaign in every run; all of them by `make torture`."""

import pytest

from .__main__ import NAMES, load
from .campaign import run

# The number of cases of each campaign in a run of the tests. A case that starts a program takes
# seconds.
CASES = {"plans": 60, "runs": 40, "faults": 60, "files": 4, "exits": 1, "limits": 1}
# These have a test of their own, or take longer than a test may.
ELSEWHERE = {"lines", "sigints", "models"}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", CASES)
def test_a_part_of_the_campaign_holds(name: str) -> None:
    figures = run(load(name), seed=1, cases=CASES[name])
    assert figures.failures == {}
    assert figures.cases == CASES[name]
    assert figures.counts


def test_no_campaign_is_left_out() -> None:
    assert set(NAMES) == CASES.keys() | ELSEWHERE


def test_a_case_is_made_of_its_seed_and_number() -> None:
    one, other = (run(load("plans"), seed=3, first=5, cases=4) for _ in range(2))
    assert one.counts == other.counts
    assert one.counts != run(load("plans"), seed=4, first=5, cases=4).counts
