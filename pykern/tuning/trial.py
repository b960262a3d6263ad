"""Runs the best proposals, so that measured steps decide between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from statistics import median
from typing import Any

import torch

from ..pipeline.pipeline import Pipeline
from ..tensors.trees import Call
from .asked import Asked
from .proposal import Proposal

# The fewest and the most rounds, and the steps that count when it is a proposal's turn.
FEWEST, MOST, STEPS = 6, 16, 2
# The first round after which a proposal may leave.
LEAVES = 3
# Two medians closer than this share of them are the same.
SAME = 0.01
# A proposal whose medians are farther than this from the least ones takes part no longer.
NEAR = 0.05
_HALVES = slice(0, None, 2), slice(1, None, 2)

# The times of one proposal in each round, in nanoseconds.
Turns = Sequence[Sequence[float]]


def run_in_turn(
    asked: Asked, proposals: Sequence[Proposal], tell: Callable[[float], object]
) -> Iterator[list[Proposal]]:
    """Runs steps of all proposals, on CPU workers in turn.

    So a slow moment of the machine is everyone's. When it is its turn, each runs three steps, of
    which two count. On GPUs one pipeline runs after another, since the layers of a model are on one
    device each at a time. A proposal is left out if it needs more memory than a GPU has after all.

    Yields:
        After each round, the proposals with the medians so far, the fastest first, and those that
        have not run. Rounds end when both halves of them agree which is the fastest; proposals that
        neither half has near the fastest leave before.

    Raises:
        torch.OutOfMemoryError: the GPUs have too little memory for every proposal.
    """
    groups = [[one] for one in proposals] if asked.gpus else [proposals]
    ran: list[Proposal] = []
    taken: list[Turns] = []
    for number, group in enumerate(groups):
        now: Sequence[Turns] = []
        left = [one for of in groups[number + 1 :] for one in of]
        try:
            for share, now in _run(asked, group):
                tell((number + share) / len(groups))
                yield [*ranked([*ran, *group], [*taken, *now]), *left]
        except torch.OutOfMemoryError:
            if not (ran or left):
                raise
            continue
        ran += group
        taken += now


def _run(asked: Asked, proposals: Sequence[Proposal]) -> Iterator[tuple[float, Sequence[Turns]]]:
    """Runs steps of some proposals in turn; yields how far this is, with their times so far."""
    batch = asked.batch(asked.rows)
    turns: list[list[list[int]]] = [[] for _ in proposals]
    with ExitStack() as opened:
        pipes = [
            opened.enter_context(asked.pipeline(one.plan, one.spans, recompute=one.levels))
            for one in proposals
        ]
        racing: Sequence[int] = range(len(pipes))
        for number in range(1, MOST + 1):
            for each in racing:
                # The first finds in the caches what another pipeline has left there.
                _, *taken = (_step_ns(asked, pipes[each], batch) for _ in range(1 + STEPS))
                turns[each].append(taken)
            yield number / MOST, turns
            if number >= LEAVES:
                racing = in_the_race(turns)
            if number >= FEWEST and is_settled([turns[each] for each in racing]):
                return


def _step_ns(asked: Asked, pipe: Pipeline, batch: tuple[Call, Any]) -> int:
    """The time of a step."""
    (args, kwargs), target = batch
    start = time.perf_counter_ns()
    pipe.step(*args, target=target, **kwargs)
    asked.wait()
    return time.perf_counter_ns() - start


def ranked(proposals: Sequence[Proposal], turns: Sequence[Turns]) -> list[Proposal]:
    """The proposals with their median times, the fastest first.

    Those that ran in more rounds come before the others, which were slower. The one
    with the fewest actions of those that are as good as the fastest comes first.
    """
    pairs = zip(proposals, turns, strict=True)
    measured = [(len(of), replace(one, measured_ns=_median(of))) for one, of in pairs]
    measured.sort(key=lambda pair: (-pair[0], _measured_ns(pair[1])))
    most, fastest = measured[0]
    limit = _measured_ns(fastest) * (1 + SAME)
    same = [one for rounds, one in measured if rounds == most and _measured_ns(one) <= limit]
    first = min(same, key=lambda one: one.plan.num_actions)
    return [first, *(one for _, one in measured if one is not first)]


def in_the_race(turns: Sequence[Turns]) -> list[int]:
    """Those that ran in all rounds and are near the fastest in every other one or in the rest."""
    most = max(map(len, turns))
    now = [number for number, of in enumerate(turns) if len(of) == most]
    near = [_least([turns[number] for number in now], half, NEAR) for half in _HALVES]
    return [now[place] for place in sorted(set.union(*near))]


def _measured_ns(proposal: Proposal) -> float:
    return proposal.measured_ns or 0.0


def is_settled(turns: Sequence[Turns]) -> bool:
    """Whether every other round and the rest have the same fastest, or as good as the same."""
    one, other = (_least(turns, half, SAME) for half in _HALVES)
    return not one.isdisjoint(other)


def _least(turns: Sequence[Turns], half: slice, within: float) -> set[int]:
    """Those whose median of some rounds is within a share of the least one."""
    medians = [_median(of[half]) for of in turns]
    return {i for i, value in enumerate(medians) if value <= min(medians) * (1 + within)}


def _median(turns: Turns) -> float:
    return float(median(chain.from_iterable(turns)))
