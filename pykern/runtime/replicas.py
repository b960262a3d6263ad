"""The stages of all replicas of a plan, and the share of each replica in a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch

from ..plan import Kind, Plan
from ..tensors.trees import Call
from .driver import Callbacks
from .microbatch import to_device
from .replica_attributes import ReplicaAttributes
from .stage.replica import Replica
from .stage.settings import Settings
from .stage.stage import Run, Stage
from .stage.transport import connect

# The kinds that stages run.
KINDS = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.REDUCE)


class Replicas:
    """The stages of a plan, once for each replica. Replicas take turns with the microbatches.

    Args:
        stages: of the first replica.
        plan: the plan that the stages run.
        devices: the torch device that holds the tensors of each device of the plan.
        ready: raises where the devices can take no batch.

    Attributes:
        each: by replica, its stages.
        stages: of the first replica, then of the second.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        plan: Plan,
        devices: Sequence[torch.device],
        ready: Callable[[], None],
    ) -> None:
        self._ready = ready
        placement = plan.placement
        self.each: list[Sequence[Stage]] = [stages]
        for number in range(1, placement.num_replicas):
            homes = [devices[placement.device_of(stage.index, number)] for stage in stages]
            self.each.append(
                [Replica(stage, home) for stage, home in zip(stages, homes, strict=True)]
            )
        for replica in self.each:
            connect(replica)
        self.stages = [stage for replica in self.each for stage in replica]
        # By stage, in a step of several replicas whose forwards are watched.
        self._attributes: list[ReplicaAttributes] = []
        # The settings of layers in the last such step: with these, forwards are known.
        self._watched_settings: list[Settings | None] = []

    def actions(self) -> dict[Kind, list[Run]]:
        """The functions that run actions, by kind and stage."""
        stages = self.stages
        return {
            Kind.F: [stage.forward for stage in stages],
            Kind.R: [stage.recompute for stage in stages],
            Kind.B: [stage.backward for stage in stages],
            Kind.I: [stage.input_gradients for stage in stages],
            Kind.W: [stage.weight_gradients for stage in stages],
            Kind.REDUCE: [stage.reduce for stage in stages],
        }

    def put_together(self, actions: dict[Kind, list[Run]]) -> Callbacks:
        """The same functions, with F, R and B as the stages have put them together for this step.

        A call that a feature has wrapped stays: it calls the stage, which calls these functions.
        """
        stages = self.stages
        forwards, again, backwards = (
            list(zip(stages, actions[kind], strict=True)) for kind in (Kind.F, Kind.R, Kind.B)
        )
        runs = [of.bare_forward if run == of.forward else run for of, run in forwards]
        if len(self.each) > 1 and not self._is_known():
            runs = self._watched(runs)
        return {
            **actions,
            Kind.F: runs,
            Kind.R: [of.bare_recompute if run == of.recompute else run for of, run in again],
            Kind.B: [of.bare_backward if run == of.backward else run for of, run in backwards],
        }

    def _is_known(self) -> bool:
        known = self._watched_settings
        return len(known) > 0 and all(map(is_, [stage.settings for stage in self.stages], known))

    def _watched(self, forwards: Sequence[Run]) -> list[Run]:
        """The functions of F, each with a look at what it assigns."""
        self._attributes = [ReplicaAttributes(stages) for stages in zip(*self.each, strict=True)]
        places = [(of, number) for number in range(len(self.each)) for of in self._attributes]
        return [of.watched(number, run) for (of, number), run in zip(places, forwards, strict=True)]

    def finish(self) -> None:
        """Raises RuntimeError if replicas have assigned attributes in no fixed order."""
        for attributes in self._attributes:
            attributes.refuse()
        if self._attributes and all([each.are_complete for each in self._attributes]):
            self._watched_settings = [stage.settings for stage in self.stages]

    def let_go(self) -> None:
        """Releases all objects of the step."""
        self._attributes = []

    @property
    def end(self) -> torch.device:
        """The device of the last stage of the first replica."""
        return self.each[0][-1].device

    def place(self, inputs: Call, target: Any) -> tuple[Call, Any]:
        """The batch on the devices that use it. Several replicas copy their microbatches later.

        Raises:
            PipelineStalled: a step has stalled, and its GPU would keep the copies waiting.
        """
        self._ready()
        first = self.each[0][0].device
        if first.type == "cpu" or len(self.each) > 1:
            return inputs, target
        return to_device(inputs, first), to_device(target, self.end)

    def place_targets(self, targets: Sequence[Any]) -> Sequence[Any]:
        """The targets of all microbatches, on the devices that compute their losses.

        The copies run before any action: inside an action, a copy between GPUs would have the lanes
        of both GPUs wait.
        """
        ends = [replica[-1].device for replica in self.each]
        if ends[0].type == "cpu" or len(ends) == 1:
            return targets
        return [to_device(each, ends[m % len(ends)]) for m, each in enumerate(targets)]

    def share_of(self, number: int, calls: Sequence[Call | None]) -> Sequence[Call | None]:
        """The calls of a batch for replica `number`; None for microbatches of other replicas."""
        if len(self.each) == 1:
            return calls
        turns = enumerate(calls)
        return [call if m % len(self.each) == number else None for m, call in turns]
