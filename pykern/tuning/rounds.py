"""Rounds of steps that measure a model in one form: a plan and the stages that run it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..modes import threads_of_a_worker
from ..pipeline.pipeline import Pipeline
from ..plan import Costs, Kind, Timeline
from ..plan.costs import by_stage
from ..tensors.trees import Call
from .asked import Asked
from .gaps import gaps


@dataclass
class Rounds:
    """A pipeline, and what its steps have taken.

    Attributes:
        kinds: the names of the kinds of actions that it is there for; it may be for none.
        pipe: the pipeline.
        batches: of the steps, by size of microbatches.
        costs: the costs of each step, by size of microbatches.
        timelines: the timelines of the same steps.
    """

    kinds: str
    pipe: Pipeline
    batches: Mapping[int, tuple[Call, Any]]
    costs: dict[int, list[Costs]] = field(default_factory=dict)
    timelines: dict[int, list[Timeline]] = field(default_factory=dict)

    def run(self, asked: Asked, *, counts: bool) -> None:
        """A step for each size, after one that finds in the caches what another form has left.

        They follow at once, the longest first: threads that have slept need some time until each
        has a core of its own.
        """
        sizes = sorted(self.batches, reverse=True)
        with beside_all(asked, self.pipe.plan.num_devices), self.pipe.tracing():
            for number, size in enumerate([sizes[-1], *sizes]):
                (args, kwargs), target = self.batches[size]
                self.pipe.step(*args, target=target, **kwargs)
                if counts and number > 0:
                    self.costs.setdefault(size, []).append(self.pipe.costs())
                    self.timelines.setdefault(size, []).append(self.pipe.timeline())

    def times_ns(self, kind: str, size: int) -> tuple[float, ...]:
        """By stage, the median time of an action."""
        num_stages = self.pipe.plan.num_stages
        rounds = [by_stage(costs, Kind[kind], num_stages) for costs in self.costs[size]]
        return tuple(map(median, zip(*rounds, strict=True)))

    def work_ns(self, size: int) -> float:
        """The time of F and B in all stages, for a microbatch of `size` rows."""
        return sum(sum(self.times_ns(kind, size)) for kind in "FB")

    def works_ns(self, size: int) -> list[float]:
        """The same in each round."""
        num_stages = self.pipe.plan.num_stages
        return [
            sum(sum(by_stage(costs, kind, num_stages)) for kind in (Kind.F, Kind.B))
            for costs in self.costs[size]
        ]

    def handed_ns(self, size: int) -> list[float]:
        """The delays of all actions that waited for another device."""
        steps = self.timelines[size]
        return [delay for step in steps for delay in gaps(self.pipe.plan, step)[1]]


def beside_all(asked: Asked, num_devices: int) -> AbstractContextManager[None]:
    """A context in which each of some devices has the intra-op threads that it has beside all."""
    return threads_of_a_worker(len(asked.site.names), num_devices)
