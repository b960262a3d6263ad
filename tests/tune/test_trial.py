"""The proposals that run: on CPU workers in turn, on GPUs one after another."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pykern.schedules import gpipe, zb_h1
from pykern.tuning import trial
from pykern.tuning.proposal import Proposal

PROPOSALS = [
    Proposal(name, gpipe(1, 1), (range(1),), 1, None, predicted_ns=1.0, bubble=0.0)
    for name in ("slow", "large", "fast")
]
TIMES_NS = {"slow": 20.0, "fast": 10.0}


def run(_: Any, proposals: Sequence[Proposal]) -> Iterator[tuple[float, list[trial.Turns]]]:
    [one] = proposals
    if one.schedule not in TIMES_NS:
        raise torch.OutOfMemoryError
    yield 1.0, [[[TIMES_NS[one.schedule]]]]


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


def run_on_workers(
    step_ns: Callable[[Any, int, Any], int], monkeypatch: pytest.MonkeyPatch
) -> list[Proposal]:
    """The proposals after all rounds, the pipelines of which are numbers, with such steps."""
    monkeypatch.setattr(trial, "_step_ns", step_ns)
    pipes = iter(range(len(PROPOSALS)))
    asked: Any = SimpleNamespace(
        gpus=[], rows=1, batch=lambda _: None, pipeline=lambda *_, **__: nullcontext(next(pipes))
    )
    *_, last = trial.run_in_turn(asked, PROPOSALS, lambda _: None)
    return last


def test_a_proposal_that_is_slow_in_both_halves_runs_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[int] = []

    def step_ns(_: Any, pipe: int, __: Any) -> int:
        ran.append(pipe)
        return [200, 101, 100][pipe]

    found = run_on_workers(step_ns, monkeypatch)
    assert [one.schedule for one in found] == ["fast", "large", "slow"]
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


def test_of_two_that_take_the_same_the_simpler_comes_first() -> None:
    simple, split = PROPOSALS[0], replace(PROPOSALS[1], plan=zb_h1(1, 2))
    assert split.plan.num_actions > simple.plan.num_actions
    order = [split, simple]
    assert trial.ranked(order, turns([100, 100], [100.9, 100.9]))[0].schedule == "slow"
    assert trial.ranked(order, turns([100, 100], [101.1, 101.1]))[0].schedule == "large"


def test_a_machine_that_slows_down_brings_nobody_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal that left while the machine was fast has the shortest times, and lost."""
    now = itertools.count()

    def step_ns(_: Any, pipe: int, __: Any) -> int:
        slower = 1 if next(now) < 3 * trial.LEAVES * (1 + trial.STEPS) else 2
        return [110, 101, 100][pipe] * slower

    found = run_on_workers(step_ns, monkeypatch)
    assert [one.schedule for one in found] == ["fast", "large", "slow"]
    assert (found[2].measured_ns or 0) < (found[0].measured_ns or 0)
