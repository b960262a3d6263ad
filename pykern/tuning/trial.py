"""Runs the best proposals, so that measured steps decide between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

import torch

from .asked import Asked
from .proposal import Proposal

# Rounds that warm up, the fewest and the most that count.
WARMUPS, FEWEST, MOST = 2, 6, 30
# Two medians closer than this share of them are the same.
SAME = 0.01


def run_in_turn(
    asked: Asked, proposals: Sequence[Proposal], tell: Callable[[float], object]
) -> Iterator[list[Proposal]]:
    """Runs steps of all proposals, on CPU workers in turn.

    So a slow moment of the machine is everyone's. On GPUs one pipeline runs after another, since
    the layers of a model are on one device each at a time. A proposal is left out if it needs more
    memory than a GPU has after all.

    Yields:
        After each round that counts, the proposals with the medians so far, the fastest first, and
        those that have not run. Rounds end when both halves of them agree which is the fastest.

    Raises:
        torch.OutOfMemoryError: the GPUs have too little memory for every proposal.
    """
    groups = [[one] for one in proposals] if asked.gpus else [proposals]
    ran: list[Proposal] = []
    for number, group in enumerate(groups):
        now: list[Proposal] = []
        left = [one for of in groups[number + 1 :] for one in of]
        try:
            for share, now in _run(asked, group):
                tell((number + share) / len(groups))
                yield [*sorted([*ran, *now], key=_measured_ns), *left]
        except torch.OutOfMemoryError:
            if not (ran or left):
                raise
            continue
        ran += now


def _run(asked: Asked, proposals: Sequence[Proposal]) -> Iterator[tuple[float, list[Proposal]]]:
    """Runs steps of some proposals in turn; yields how far this is, with the proposals so far."""
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
                asked.wait()
                if number >= WARMUPS:
                    taken.append(time.perf_counter_ns() - start)
            if number >= WARMUPS:
                yield (number + 1) / (WARMUPS + MOST), ranked(proposals, times)
            if number + 1 >= WARMUPS + FEWEST and is_settled(times):
                return


def ranked(proposals: Sequence[Proposal], times: Sequence[Sequence[int]]) -> list[Proposal]:
    """The proposals with their median times, the fastest first."""
    pairs = zip(proposals, times, strict=True)
    measured = [replace(one, measured_ns=float(median(of))) for one, of in pairs]
    return sorted(measured, key=_measured_ns)


def _measured_ns(proposal: Proposal) -> float:
    return proposal.measured_ns or 0.0


def is_settled(times: Sequence[Sequence[int]]) -> bool:
    """Whether every other round and the rest have the same fastest, or as good as the same."""
    best = []
    for half in (slice(0, None, 2), slice(1, None, 2)):
        medians = [median(of[half]) for of in times]
        least = min(medians)
        best.append({i for i, value in enumerate(medians) if value <= least * (1 + SAME)})
    return not best[0].isdisjoint(best[1])
