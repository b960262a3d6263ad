"""The cost of durations that vary from action to action. The module needs numpy."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pykern.plan import Action, Costs, Kind, Plan, Span, Timeline, require_counts, simulate
from pykern.plan.counts import require_numbers
from pykern.plan.files.transfers import in_slots
from pykern.plan.inputs import GRADIENTS, inputs

# One number for each simulated step.
Times = NDArray[np.float64]


@dataclass(frozen=True)
class Jitter:
    """Lengths of many simulated steps.

    Attributes:
        even_ns: The step without jitter.
        steps_ns: The steps with it, ascending: each until the slowest pipeline is done.
        waits_ns: By device of a pipeline, how long it waits on average for the slowest of those
            with the same stages, which sum their gradients. 0 with one pipeline.
    """

    even_ns: float
    steps_ns: tuple[float, ...]
    waits_ns: tuple[float, ...]

    @property
    def mean_ns(self) -> float:
        """The step on average."""
        return math.fsum(self.steps_ns) / len(self.steps_ns)

    @property
    def percentile_95_ns(self) -> float:
        """The shortest time that 95 of 100 steps keep to."""
        return self.steps_ns[math.ceil(0.95 * len(self.steps_ns)) - 1]


def jitter(
    plan: Plan,
    costs: Costs,
    variation: float,
    num_steps: int = 1000,
    seed: int = 0,
    pipelines: int = 1,
) -> Jitter:
    """Simulate steps whose actions each take a time of their own.

    An action takes its cost times a gamma draw of mean 1, independent of all other draws. A pair
    that overlaps has one draw. Transfers take what the costs say: links do not vary. Slow hosts
    and devices that are slow for longer than an action are left out. Pipelines wait for each other
    at the end of a step, as their sums of gradients run beside what a device computes.

    Args:
        plan: With one copy of the model.
        costs: Without jitter.
        variation: Standard deviation of a draw, from 0 to 10.
        num_steps: How many steps are simulated.
        seed: The same one gives the same steps.
        pipelines: Data parallel: so many of them, each with draws of its own.

    Raises:
        TypeError: A count is not an int.
        ValueError: A count is below 1, the variation is out of range, the plan has several copies
            of the model, or costs and plan do not fit.
    """
    require_counts(num_steps=num_steps, pipelines=pipelines)
    require_numbers(variation=variation)
    if not 0 <= variation <= 10:
        raise ValueError(
            f"variation must be 0 to 10, got {variation}. 0.1 is a tenth of an action's time"
        )
    if plan.placement.num_replicas > 1:
        raise ValueError(
            "plan must have one copy of the model, got "
            f"{plan.placement.num_replicas}. Choose another schedule"
        )
    timeline = simulate(plan, costs)
    random = np.random.default_rng(seed)
    num_walks = num_steps * pipelines

    def draw() -> Times:
        # Smaller ones change no double.
        if 1 + variation == 1:
            return np.ones(num_walks)
        return random.gamma(variation**-2, variation**2, num_walks)

    ends_ns = np.stack(_Walk(plan, costs, timeline, num_walks).ends_ns(draw))
    by_group = ends_ns.reshape(plan.num_devices, num_steps, pipelines)
    slowest_ns = by_group.max(axis=2)
    return Jitter(
        timeline.makespan_ns,
        tuple(np.sort(slowest_ns.max(axis=0)).tolist()),
        tuple((slowest_ns[:, :, None] - by_group).mean(axis=(1, 2)).tolist()),
    )


class _Walk:
    """All steps of all pipelines at once: every action after those that it waits for."""

    def __init__(self, plan: Plan, costs: Costs, timeline: Timeline, num_walks: int) -> None:
        self._costs = costs
        self._device_of = {action: i for i, row in enumerate(plan.rows) for action in row}
        self._slots = [
            deque(in_slots(row, pairs))
            for row, pairs in zip(timeline.rows, plan.overlaps, strict=True)
        ]
        self._ends_ns: list[Times] = [np.zeros(num_walks)] * plan.num_devices
        # By action whose result another device has yet to take, and by directed link.
        self._arrivals_ns: dict[Action, Times] = {}
        self._links_free_ns: dict[tuple[int, int], Times] = {}

    def ends_ns(self, draw: Callable[[], Times]) -> list[Times]:
        """When each device is done."""
        while any(self._slots):
            for device, slots in enumerate(self._slots):
                while slots and all(i in self._arrivals_ns for i in self._awaited(slots[0])):
                    self._run(device, slots.popleft(), draw())
        return self._ends_ns

    def _run(self, device: int, slot: tuple[Span, ...], factor: Times) -> None:
        start_ns = self._ends_ns[device]
        for awaited in self._awaited(slot):
            start_ns = np.maximum(start_ns, self._arrivals_ns.pop(awaited))
        end_ns = self._ends_ns[device] = start_ns + factor * (slot[0].end_ns - slot[0].start_ns)
        for span in slot:
            for receiver in _receivers(span.action):
                other = self._device_of.get(receiver, device)
                if other == device:
                    continue
                leaves_ns = end_ns
                if self._costs.shared_links and (device, other) in self._links_free_ns:
                    leaves_ns = np.maximum(end_ns, self._links_free_ns[device, other])
                sent_ns = leaves_ns + self._message_ns(span.action)
                self._links_free_ns[device, other] = sent_ns
                self._arrivals_ns[span.action] = sent_ns + self._costs.transfer_ns

    def _awaited(self, slot: tuple[Span, ...]) -> list[Action]:
        """Inputs from other devices; those of the same row are there when the device is free."""
        here = self._device_of[slot[0].action]
        found = [each for span in slot for each in inputs(span.action)]
        return [each for each in found if self._device_of.get(each, here) != here]

    def _message_ns(self, action: Action) -> float:
        boundary = action.stage - (action.kind is not Kind.F)
        sizes = self._costs.message_bytes
        num_bytes = sizes if isinstance(sizes, float) else sizes[boundary]
        return num_bytes / self._costs.bandwidth


def _receivers(action: Action) -> list[Action]:
    """The actions of other stages that may take its result."""
    cell = action.microbatch, action.slice
    if action.kind is Kind.F:
        return [Action(Kind.F, action.stage + 1, *cell)]
    if action.kind in GRADIENTS and action.stage > 0:
        return [Action(kind, action.stage - 1, *cell) for kind in GRADIENTS]
    return []
