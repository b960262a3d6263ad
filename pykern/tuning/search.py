"""The proposals with the shortest predicted steps, by simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import ceil, isfinite
from typing import cast

from ..budget.fit import fit
from ..budget.fit_memory import most_held
from ..budget.level_costs import StageLevel
from ..budget.measure import with_starts
from ..partition.unequal import neighbours
from ..pipeline.choose_levels import Levels
from ..plan import Costs, Kind, Plan, Timeline, simulate
from ..plan.shares import Shares
from ..search import auto
from .measurements import Measurements
from .proposal import Proposal
from .shared_cores import simulate_shared
from .space import (
    balanced_spans,
    max_chunks_of,
    microbatches_of_one,
    plans_of,
    shares_of,
)
from .stage_levels import StageLevels

# Proposals that are kept while others are looked at, and those whose cuts are then made better.
KEPT, POLISHED = 24, 8
# Numbers of microbatches and replicas for which an order of its own is searched.
ORDERED = 2


class ProposalSearch:
    """Looks at all proposals for what was measured. The same measurements give the same ones.

    Args:
        measured: the measurements of the model.
        num_devices: the number of devices.
        rows: the number of rows of a batch.
        memory: bytes that each device has; None for any number.
        replicated: whether the model can have replicas.

    Attributes:
        best: the proposals found so far, by predicted time.
        num_simulated: the number of plans that were simulated.
        num_pruned: the number of pairs of microbatches and replicas that a bound has ruled out.
    """

    def __init__(
        self,
        measured: Measurements,
        num_devices: int,
        rows: int,
        memory: float | None = None,
        *,
        replicated: bool = True,
    ) -> None:
        self._measured, self._rows, self._memory = measured, rows, memory
        self._num_devices = num_devices
        replicated = replicated and isfinite(measured.replica_ns)
        self._stages = StageLevels(measured)
        self._shares = [
            shares
            for shares in shares_of(num_devices, rows, replicated=replicated)
            if max_chunks_of(shares, len(measured.units)) > 0
        ]
        self.best: list[Proposal] = []
        self.num_simulated = self.num_pruned = 0

    def run(self, tell: Callable[[float], object]) -> list[Proposal]:
        """All of it.

        Args:
            tell: called with how much is done, 0 to 1.

        Raises:
            ValueError: the model has fewer units than every replica has devices, or nothing fits
                in the memory.
        """
        if not self._shares:
            raise ValueError(
                f"devices must be at most {len(self._measured.units)}, the number of places where "
                "a stage of this model can begin. Use fewer devices"
            )
        for number, shares in enumerate(sorted(self._shares, key=self.bound_ns)):
            # All later shares have higher bounds.
            if self.bound_ns(shares) >= self._limit():
                self.num_pruned = len(self._shares) - number
                break
            for name, plan in plans_of(shares, len(self._measured.units)):
                self._take(name, plan, shares)
            tell(0.8 * (number + 1) / len(self._shares))
        for shares in self._of_the_best():
            for name, plan in self._ordered(shares):
                self._take(name, plan, shares)
        tell(0.9)
        for proposal in self.best[:POLISHED]:
            self._polish(proposal)
        if not self.best:
            raise ValueError(
                f"memory must be enough for some plan, got {self._memory} bytes, which none of "
                f"{self.num_simulated} plans fits at any recompute level. Use more devices"
            )
        tell(1.0)
        return self.best

    def finalists(self, count: int) -> list[Proposal]:
        """The best proposals, of `count` kinds.

        Half of them are the best of different numbers of microbatches and replicas: predictions
        for the same numbers are off in the same direction.
        """
        apart = _first_of_each(self.best, lambda one: one.kind[1:])[: (count + 1) // 2]
        others = _first_of_each([*apart, *self.best], lambda one: one.kind)[len(apart) : count]
        return sorted([*apart, *others], key=lambda one: one.predicted_ns)

    def replace(self, one: Proposal, by: Proposal | None) -> None:
        """Puts another proposal in the place of one of the best, or nothing."""
        place = next(number for number, each in enumerate(self.best) if each is one)
        self.best[place : place + 1] = [] if by is None else [by]

    def bound_ns(self, shares: Shares) -> float:
        """A lower bound for all plans with these microbatches: all work, shared evenly."""
        measured, rows = self._measured, self._rows_of(shares)
        once = len(measured.units) - shares.devices_of_one
        whole, halves = (
            sum(
                sum(measured.of_units(kind, rows)) - once * measured.once_ns(kind, rows)
                for kind in of
            )
            for of in ("FB", "FIW")
        )
        # As much work as all devices do in a nanosecond at most.
        most = max(n * speed for n, speed in enumerate(self._speeds(rows), 1))
        work = self._rows / rows * min(whole, halves)
        return work / most + measured.outside_ns(0, shares.replicas)

    def predict(self, plan: Plan, costs: Costs, rows: float) -> Timeline:
        """Simulates a step with microbatches of `rows` rows."""
        speeds = self._speeds(rows)
        if plan.num_devices > len(speeds) or set(speeds) != {1.0}:
            return simulate_shared(plan, costs, speeds)
        return simulate(plan, costs)

    def _rows_of(self, shares: Shares) -> float:
        """The rows of a microbatch; some have a part of a row more, or less."""
        assert shares.num_microbatches is not None
        return self._rows / shares.num_microbatches

    def _speeds(self, rows: float) -> list[float]:
        return self._measured.speeds_for(rows)[: self._num_devices]

    def _limit(self) -> float:
        """The predicted time that a proposal has to beat."""
        return self.best[-1].predicted_ns if len(self.best) == KEPT else float("inf")

    def _take(self, name: str, plan: Plan, shares: Shares) -> None:
        """Keeps the plan, with its cut of equal times, if it is among the best."""
        rows = self._rows_of(shares)
        spans = balanced_spans(self._measured, plan.num_stages, rows)
        self._keep(self._proposal(name, shares.side_by_side(plan), spans, shares.replicas))

    def _keep(self, proposal: Proposal | None) -> None:
        if proposal is None or proposal.predicted_ns >= self._limit():
            return
        if any((one.plan, one.spans) == (proposal.plan, proposal.spans) for one in self.best):
            return
        # The sort is stable: among equal proposals the first stays in front.
        self.best = sorted([*self.best, proposal], key=lambda one: one.predicted_ns)[:KEPT]

    def _proposal(
        self, name: str, plan: Plan, spans: tuple[range, ...], replicas: int
    ) -> Proposal | None:
        """The proposal with its levels; None if it is too slow, or too large."""
        self.num_simulated += 1
        rows = self._rows / plan.num_microbatches
        costs = self._measured.costs_of(plan, spans, rows)
        # At the speed of one that computes alone, without R, it would take less.
        fastest = max(self._speeds(rows))
        outside_ns = self._measured.outside_ns(plan.num_actions, plan.placement.num_replicas)
        if simulate(plan, costs).makespan_ns / fastest + outside_ns >= self._limit():
            return None
        # The largest microbatch counts.
        of_stages = self._stages.of(spans, ceil(rows), costs, split=plan.has(Kind.I))
        stages = with_starts(of_stages, plan)
        weights = self._weights(plan, spans)
        levels: list[StageLevel] = [StageLevel("ops")] * plan.num_stages
        by_microbatch: Levels | None = None
        if self._memory is not None:
            budgets = [self._memory - held for held in weights]
            if min(budgets) <= 0:
                return None
            try:
                fitted = fit(plan, stages, budgets)
            except ValueError:
                return None
            recomputes = fitted.plan.num_actions > plan.num_actions
            plan, levels = fitted.plan, list(fitted.levels)
            by_microbatch = cast("Levels", fitted.by_microbatch()) if recomputes else None
        timeline = self.predict(plan, costs, rows)
        held = most_held(plan, stages, levels)
        return Proposal(
            name,
            plan,
            spans,
            replicas,
            by_microbatch,
            timeline.makespan_ns + outside_ns,
            timeline.bubble_ratio,
            tuple(weights),
            tuple(held),
        )

    def _weights(self, plan: Plan, spans: tuple[range, ...]) -> list[float]:
        """By device, the bytes that it holds all the time."""
        of_stages = self._measured.weights_of(spans)
        homes = [set(devices) for devices in zip(*plan.placement.replicas, strict=True)]
        return [
            sum(of for of, devices in zip(of_stages, homes, strict=True) if device in devices)
            for device in range(plan.num_devices)
        ]

    def _of_the_best(self) -> list[Shares]:
        """The numbers of microbatches and replicas of the best proposals, each pair once."""
        found = dict.fromkeys((one.microbatches, one.replicas) for one in self.best)
        return [
            next(s for s in self._shares if (s.num_microbatches, s.replicas) == pair)
            for pair in islice(found, ORDERED)
        ]

    def _ordered(self, shares: Shares) -> Iterator[tuple[str, Plan]]:
        """Orders made for these costs: with as much in flight as in 1F1B, and without a limit."""
        count, rows = microbatches_of_one(shares), self._rows_of(shares)

        def costs(num_stages: int) -> Costs:
            return self._measured.costs(balanced_spans(self._measured, num_stages, rows), rows)

        for memory in (1.0, max(count / shares.devices_of_one, 1.0)):
            found = auto(
                shares.devices_of_one,
                count,
                costs=costs,
                memory=memory,
                max_chunks=max_chunks_of(shares, len(self._measured.units)),
            )
            yield "auto", found.plan

    def _polish(self, proposal: Proposal) -> None:
        """Moves boundaries by a unit as long as this makes a step shorter."""
        better: Proposal | None = proposal
        plan = None if proposal.levels is not None else proposal.plan
        while better is not None and plan is not None:
            proposal = better
            tried = [
                self._proposal(proposal.schedule, plan, spans, proposal.replicas)
                for spans in neighbours(proposal.spans)
            ]
            found = [one for one in tried if one is not None]
            better = min(found, key=lambda one: one.predicted_ns, default=None)
            if better is None or better.predicted_ns >= proposal.predicted_ns:
                break
            self.best = [one for one in self.best if one is not proposal]
            self._keep(better)


def _first_of_each(
    proposals: Sequence[Proposal], key: Callable[[Proposal], object]
) -> list[Proposal]:
    """The first proposal of each key, in their order."""
    found: dict[object, Proposal] = {}
    for proposal in proposals:
        found.setdefault(key(proposal), proposal)
    return list(found.values())
