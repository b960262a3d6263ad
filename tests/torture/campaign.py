"""Campaigns of random cases, each made of a seed and a number alone."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Protocol


class Case(Protocol):
    """One try of a campaign, which counts its findings; raises if the promise is broken."""

    def __call__(self, seed: int, number: int) -> Iterator[str]:
        """Yields a name for each event that is counted."""


@dataclass(frozen=True)
class Campaign:
    """Cases that try to break one promise.

    Attributes:
        promise: the promise as a sentence.
        case: runs one case.
        total: the number of different cases; None for an unlimited number.
        seconds: the default duration of a run.
        around: makes a context for the duration of a run.
    """

    promise: str
    case: Case
    total: int | None = None
    seconds: float = 60.0
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class Figures:
    """The results of a run.

    Attributes:
        cases: the number of cases.
        counts: how often each name was yielded.
        failures: the number of each failed case, with its message.
    """

    seed: int
    cases: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)


# A defect breaks most of the later cases, and their messages repeat.
MOST_FAILURES = 20


def run(
    campaign: Campaign,
    seed: int,
    first: int = 0,
    *,
    cases: int | None,
    seconds: float = inf,
    note: Callable[[int], object] = lambda _: None,
) -> Figures:
    """Tries cases one after another.

    Args:
        campaign: which.
        seed: of all of them.
        first: number of the first.
        cases: how many; None for as many as there is time for.
        seconds: how long, where `cases` is None.
        note: called with the number of each case before it begins.
    """
    figures = Figures(seed)
    begin = time.monotonic()
    last = first + cases if cases is not None else campaign.total
    number = first
    with campaign.around():
        while (last is None or number < last) and len(figures.failures) < MOST_FAILURES:
            if cases is None and time.monotonic() - begin > seconds:
                break
            note(number)
            try:
                for name in campaign.case(seed, number):
                    figures.counts[name] += 1
            except Exception as error:
                figures.failures[number] = _told(error)
            figures.cases += 1
            number += 1
    figures.seconds = time.monotonic() - begin
    return figures


def _told(error: Exception) -> str:
    return "".join(traceback.format_exception(error))
