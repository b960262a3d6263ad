"""Two runs side by side, figure by figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .figures import BoxResults

FigureVerdict = Literal["SAME", "FASTER", "SLOWER", "AMBIGUOUS"]

# Medians this close are the same, if the intervals overlap.
_SAME = 0.02


@dataclass(frozen=True)
class Comparison:
    """One figure of two runs.

    Attributes:
        name: The name of the figure.
        unit: The unit of the medians.
        before: The median of the first run.
        after: The median of the second run.
        verdict: On the second run.
    """

    name: str
    unit: str
    before: float
    after: float
    verdict: FigureVerdict


def compare(before: BoxResults, after: BoxResults) -> list[Comparison]:
    """The figures that both runs have, in the order of the first."""
    others = {figure.name: figure for figure in after.figures}
    found = []
    for one in before.figures:
        other = others.get(one.name)
        if other is not None:
            verdict = verdict_of(other.median / one.median, other.interval, one.interval)
            found.append(Comparison(one.name, one.unit, one.median, other.median, verdict))
    return found


def verdict_of(
    ratio: float, interval: tuple[float, float], baseline: tuple[float, float]
) -> FigureVerdict:
    """A difference is claimed only where the intervals are apart."""
    if interval[1] < baseline[0]:
        return "FASTER"
    if interval[0] > baseline[1]:
        return "SLOWER"
    return "SAME" if abs(ratio - 1) <= _SAME else "AMBIGUOUS"
