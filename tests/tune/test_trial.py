"""The proposals that run: on CPU workers in turn, on GPUs one after another."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pykern.schedules import gpipe
from pykern.tuning import trial
from pykern.tuning.proposal import Proposal

PROPOSALS = [
    Proposal(name, gpipe(1, 1), (range(1),), 1, None, predicted_ns=1.0, bubble=0.0)
    for name in ("slow", "large", "fast")
]
TIMES_NS = {"slow": 20.0, "fast": 10.0}


def run(_: Any, proposals: Sequence[Proposal]) -> Iterator[tuple[float, list[Proposal]]]:
    [one] = proposals
    if one.schedule not in TIMES_NS:
        raise torch.OutOfMemoryError
    yield 1.0, [replace(one, measured_ns=TIMES_NS[one.schedule])]


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trial, "_run", run)
    return SimpleNamespace(gpus=["cuda:0"])


def test_a_proposal_that_does_not_fit_after_all_is_left_out(on_gpus: Any) -> None:
    told: list[float] = []
    found = [
        [one.schedule for one in now] for now in trial.run_in_turn(on_gpus, PROPOSALS, told.append)
    ]
    assert found == [["slow", "large", "fast"], ["fast", "slow"]]
    assert told == [pytest.approx(1 / 3), 1.0]


def test_too_little_memory_for_every_proposal_is_an_error(on_gpus: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        list(trial.run_in_turn(on_gpus, PROPOSALS[1:2], lambda _: None))


def test_a_proposal_that_is_slow_in_both_halves_runs_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[int] = []

    def step_ns(_: Any, pipe: int, __: Any) -> int:
        ran.append(pipe)
        return [200, 101, 100][pipe]

    monkeypatch.setattr(trial, "_step_ns", step_ns)
    pipes = iter(range(3))
    asked: Any = SimpleNamespace(
        gpus=[], rows=1, batch=lambda _: None, pipeline=lambda *_, **__: nullcontext(next(pipes))
    )
    *_, last = trial.run_in_turn(asked, PROPOSALS, lambda _: None)
    assert [one.schedule for one in last] == ["fast", "large", "slow"]
    steps = 1 + trial.STEPS
    assert [ran.count(pipe) for pipe in range(3)] == [
        trial.LEAVES * steps,
        *[trial.FEWEST * steps] * 2,
    ]


def turns(*of_proposals: Sequence[float]) -> list[list[list[float]]]:
    """The times of one step in each round."""
    return [[[time] for time in times] for times in of_proposals]


def test_halves_of_rounds_have_to_agree() -> None:
    assert trial.is_settled(turns([10, 10, 10, 10], [20, 20, 20, 20]))
    assert not trial.is_settled(turns([10, 20, 10, 20], [20, 10, 20, 10]))
    # Half a per cent apart is the same.
    assert trial.is_settled(turns([1000, 1005, 1000, 1005], [1005, 1000, 1005, 1000]))


def test_one_slow_step_of_a_turn_leaves_a_half_as_it_is() -> None:
    steady = [[10.0, 10.0]] * 4
    jolted = [[9.0, 99.0], [9.0, 9.0], [9.0, 9.0], [9.0, 9.0]]
    assert trial.is_settled([steady, jolted])
    best, _ = trial.ranked(PROPOSALS[:2], [steady, jolted])
    assert (best.schedule, best.measured_ns) == ("large", 9.0)


def test_proposals_that_are_slow_in_both_halves_leave_the_race() -> None:
    #          fast in one half, in the other, in neither, left earlier
    times = [[100, 120, 100, 120], [120, 100, 120, 100], [110, 111, 110, 111], [50, 50]]
    assert trial.in_the_race(turns(*times)) == [0, 1]
    # 4 % behind is near.
    assert trial.in_the_race(turns([100, 100], [104, 104], [106, 106])) == [0, 1]


def test_proposals_that_left_the_race_come_last() -> None:
    ranked = trial.ranked(PROPOSALS, turns([5, 5], [9, 9, 9], [8, 8, 8]))
    assert [one.measured_ns for one in ranked] == [8.0, 9.0, 5.0]
