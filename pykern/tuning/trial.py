"""Runs the best proposals, so that measured steps decide between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from .asked import Asked
from .proposal import Proposal

# Rounds that warm up, the fewest and the most that count.
WARMUPS, FEWEST, MOST = 2, 6, 30
# Two medians closer than this share of them are the same.
SAME = 0.01


def run_in_turn(
    asked: Asked, proposals: Sequence[Proposal], tell: Callable[[float], object]
) -> Iterator[list[Proposal]]:
    """Runs steps of all proposals in turn, so that a slow moment of the machine is everyone's.

    Yields:
        After each round that counts, the proposals with the medians so far, the fastest first.
        Rounds end when both halves of them agree which is the fastest.
    """
    (args, kwargs), target = asked.batch(asked.rows)
    times: list[list[int]] = [[] for _ in proposals]
    with ExitStack() as opened:
        pipes = [
            opened.enter_context(asked.pipeline(one.plan, one.spans, recompute=one.levels))
            for one in proposals
        ]
        for number in range(WARMUPS + MOST):
            for pipe, taken in zip(pipes, times, strict=True):
                start = time.perf_counter_ns()
                pipe.step(*args, target=target, **kwargs)
                if number >= WARMUPS:
                    taken.append(time.perf_counter_ns() - start)
            tell((number + 1) / (WARMUPS + MOST))
            if number >= WARMUPS:
                yield ranked(proposals, times)
            if number + 1 >= WARMUPS + FEWEST and is_settled(times):
                return


def ranked(proposals: Sequence[Proposal], times: Sequence[Sequence[int]]) -> list[Proposal]:
    """The proposals with their median times, the fastest first."""
    pairs = zip(proposals, times, strict=True)
    measured = [replace(one, measured_ns=float(median(of))) for one, of in pairs]
    return sorted(measured, key=lambda one: one.measured_ns or 0.0)


def is_settled(times: Sequence[Sequence[int]]) -> bool:
    """Whether every other round and the rest have the same fastest, or as good as the same."""
    best = []
    for half in (slice(0, None, 2), slice(1, None, 2)):
        medians = [median(of[half]) for of in times]
        least = min(medians)
        best.append({i for i, value in enumerate(medians) if value <= least * (1 + SAME)})
    return not best[0].isdisjoint(best[1])
