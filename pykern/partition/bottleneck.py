"""Cuts a row of costs into stages, so that the slowest stage is as fast as possible."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from math import ceil, floor
from typing import NamedTuple


def balanced_ends(costs: Sequence[int], num_stages: int) -> list[int]:
    """The end of every stage, by the rule that `partition` documents.

    For n layers in S stages the search takes at most S n log n steps, and few if stages can only
    end near their share of the cost.
    """
    total = [0, *accumulate(costs)]
    limit = _least_bottleneck(costs, num_stages)
    bands = _bands(total, num_stages, limit)
    best = _Ends({0: 0}, {0: 0}, {})
    starts = []
    for before, band in pairwise(bands):
        best = _longer(total, best, before, band, limit)
        starts.append(best.start)
    ends = [len(costs)]
    for start in reversed(starts):
        ends.append(start[ends[-1]])
    return ends[-2::-1]


def spans_of(ends: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, by the ends of the stages."""
    return tuple(range(start, end) for start, end in pairwise([0, *ends]))


@dataclass(frozen=True)
class _Ends:
    """The best cuts of layers[:end] into as many stages as rounds passed, by end.

    Attributes:
        badness: sum of squares of costs, then of counts, in one number.
        rank: rank of the cut among the cuts of other ends, by the ends of the first stages.
        start: start of the last stage.
    """

    badness: dict[int, int]
    rank: dict[int, int]
    start: dict[int, int]


def _bands(total: Sequence[int], num_stages: int, limit: int) -> list[range]:
    """The range of ends of each stage, after that of the chain's start, with costs in the limit.

    The ranges have no gaps: a stage that can end at two layers can end between them.
    """
    num_layers = len(total) - 1
    last = [0]
    for _ in range(num_stages):
        last.append(bisect_right(total, total[last[-1]] + limit) - 1)
    first = [num_layers]
    for _ in range(num_stages):
        first.append(bisect_left(total, total[first[-1]] - limit))
    return [
        range(max(low, stage), min(high, num_layers - num_stages + stage) + 1)
        for stage, (low, high) in enumerate(zip(reversed(first), last, strict=True))
    ]


def _longer(total: Sequence[int], best: _Ends, before: range, band: range, limit: int) -> _Ends:
    """The best cuts with one stage more, whose ends are in the band.

    A later end never has an earlier best start, since squares of sums are convex. So the middle end
    is computed first, and its start bounds the starts of the ends on either side.
    """
    # The scale exceeds any sum of squares of counts, so that costs come first.
    scale = len(total) ** 2
    badness: dict[int, int] = {}
    starts: dict[int, int] = {}
    left = [(band.start, band.stop, before.start, before.stop)]
    while left:
        low, high, first, last = left.pop()
        if low >= high:
            continue
        end = (low + high) // 2
        candidates = (
            (
                best.badness[start] + (total[end] - total[start]) ** 2 * scale + (end - start) ** 2,
                best.rank[start],
                start,
            )
            for start in range(max(first, bisect_left(total, total[end] - limit)), min(last, end))
        )
        badness[end], _, start = min(candidates)
        starts[end] = start
        left += [(low, end, first, start + 1), (end + 1, high, start, last)]
    order = sorted(band, key=lambda end: (best.rank[starts[end]], end))
    return _Ends(badness, {end: place for place, end in enumerate(order)}, starts)


def _least_bottleneck(costs: Sequence[int], num_stages: int) -> int:
    """The smallest limit under which greedy filling needs at most `num_stages` stages.

    Fewer stages than `num_stages` are fine: splitting a stage further never makes it costlier.
    """

    def fits(limit: int) -> bool:
        stages, filled = 1, 0
        for cost in costs:
            if filled + cost > limit:
                stages, filled = stages + 1, 0
            filled += cost
        return stages <= num_stages

    low, high = max(costs), sum(costs)
    return low + bisect_left(range(low, high), True, key=fits)


class Limit(NamedTuple):
    """The most that stages may hold, such as the memory of their devices.

    Attributes:
        total: the sums over the layers in front of each layer, and over all of them.
        most: by stage, the most that it may hold.
    """

    total: Sequence[int]
    most: Sequence[int]

    def kept_by(self, stages: Sequence[range]) -> bool:
        """Whether stages of these layers hold no more."""
        pairs = zip(stages, self.most, strict=True)
        return all(self.total[of.stop] - self.total[of.start] <= most for of, most in pairs)


def ends_for_speeds(
    costs: Sequence[int], speeds: Sequence[float], limits: Sequence[Limit] = ()
) -> list[int]:
    """The end of every stage of the cut whose slowest stage takes least.

    The cut is exact: stage i takes the sum of its costs divided by `speeds[i]`, and no other cut
    into non-empty stages has a faster slowest stage. Among tied cuts, the first stages are short.

    Args:
        costs: the costs of layers, at least as many as stages.
        speeds: the speeds by stage, above 0.
        limits: bounds that every cut must keep.

    Raises:
        ValueError: no cut keeps them.
    """
    total = [0, *accumulate(costs)]
    exact = [Fraction(speed) for speed in speeds]

    def within(most: Sequence[int]) -> list[int] | None:
        return _within([Limit(total, most), *limits])

    if (ends := within([total[-1]] * len(speeds))) is None:
        [limit, *_] = limits
        raise ValueError(
            f"memory must hold {limit.total[-1]} bytes in some cut into {len(speeds)} stages, got "
            f"{sum(limit.most)} in {list(limit.most)}. Use more or larger devices"
        )
    low, best = Fraction(0), _slowest(total, ends, exact)
    while True:
        faster = within([ceil(best * speed) - 1 for speed in exact])
        if faster is None:
            return within([floor(best * speed) for speed in exact]) or ends
        best = _slowest(total, faster, exact)
        # Halving finds the neighbourhood of the best; single steps between cuts end there.
        middle = Fraction(float(low + best) / 2)
        if (halved := within([floor(middle * speed) for speed in exact])) is None:
            low = middle
        else:
            best = min(best, _slowest(total, halved, exact))


def _slowest(total: Sequence[int], ends: Sequence[int], speeds: Sequence[Fraction]) -> Fraction:
    spans = zip(pairwise([0, *ends]), speeds, strict=True)
    return max((total[end] - total[start]) / speed for (start, end), speed in spans)


def _within(limits: Sequence[Limit]) -> list[int] | None:
    """Ends of non-empty stages that keep the limits, or None without such a cut."""
    num_layers = len(limits[0].total) - 1
    by_stage = list(zip(*(limit.most for limit in limits), strict=True))
    totals = [limit.total for limit in limits]
    reached = [[0]]
    for of_stage in by_stage:
        ends: list[int] = []
        for start in reached[-1]:
            pairs = zip(totals, of_stage, strict=True)
            last = min(bisect_right(total, total[start] + most) - 1 for total, most in pairs)
            ends += range(max(start, ends[-1] if ends else 0) + 1, last + 1)
        reached.append(ends)
    if not reached[-1] or reached[-1][-1] != num_layers:
        return None
    found = [num_layers]
    for starts, of_stage in zip(reached[-2::-1], reversed(by_stage), strict=True):
        pairs = zip(totals, of_stage, strict=True)
        first = max(bisect_left(total, total[found[-1]] - most) for total, most in pairs)
        # The end was reached from some start, so the earliest start in the limit reaches it too.
        found.append(starts[bisect_left(starts, first)])
    return found[-2::-1]
