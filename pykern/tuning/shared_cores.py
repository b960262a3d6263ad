"""Simulation of devices that share cores: each computes slower, the more of them compute."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from statistics import median

from ..plan import Action, Costs, Kind, Plan, Span, Timeline
from ..plan.costs import TIME_OF, by_stage
from ..plan.inputs import inputs


def simulate_shared(plan: Plan, costs: Costs, speeds: Sequence[float]) -> Timeline:
    """The timeline of a step on devices that slow each other down.

    More devices than speeds share the cores of the last one evenly, as threads do. With a speed of
    1 for every number of devices it is the timeline of `pykern.plan.simulate`.

    Args:
        plan: a plan without overlapped pairs and U.
        costs: the costs of its stages; a hand-over takes `transfer_ns`.
        speeds: the speed of a device while one, two, ... devices compute; the costs are at speed 1.
    """
    return _Shared(plan, costs, speeds).run()


class _Shared:
    """The state of a simulation.

    All running actions are equally fast at any time. So one clock counts the work that each of them
    would have had since the step began: an action ends when that clock has moved by its time.
    """

    def __init__(self, plan: Plan, costs: Costs, speeds: Sequence[float]) -> None:
        self._plan, self._speeds, self._hop = plan, speeds, costs.transfer_ns
        self._times = _times(plan, costs)
        # Each look at a plan's rows makes objects of all of its actions.
        self._rows = plan.rows
        self._actions = {action for row in self._rows for action in row}
        self._next = [0] * plan.num_devices
        self._ends: dict[Action, float] = {}
        self._spans: list[list[Span]] = [[] for _ in self._rows]
        self._now = self._work = 0.0
        # The running actions' ends on the clock of work, with their devices; and their start times.
        self._running: list[tuple[float, int]] = []
        self._began = [0.0] * plan.num_devices
        # Devices whose next action has all inputs, and when the last of these arrives.
        self._arriving: list[tuple[float, int]] = []
        self._waiting = set(range(plan.num_devices))

    def run(self) -> Timeline:
        """See `simulate_shared`."""
        self._look()
        while self._running or self._arriving:
            speed = speed_of(self._speeds, max(len(self._running), 1))
            work = self._running[0][0] - self._work if self._running else math.inf
            arrival = self._arriving[0][0] if self._arriving else math.inf
            if arrival <= self._now + work / speed:
                self._work += (arrival - self._now) * speed
                self._now = arrival
                self._begin(heappop(self._arriving)[1])
            else:
                self._now += work / speed
                self._work += work
                self._end(heappop(self._running)[1])
        return Timeline(self._spans)

    def _begin(self, device: int) -> None:
        action = self._rows[device][self._next[device]]
        self._began[device] = self._now
        heappush(self._running, (self._work + self._times[action.kind, action.stage], device))

    def _end(self, device: int) -> None:
        action = self._rows[device][self._next[device]]
        self._spans[device].append(Span(action, self._began[device], self._now))
        self._ends[action] = self._now
        self._next[device] += 1
        self._waiting.add(device)
        self._look()

    def _look(self) -> None:
        """Takes the waiting devices whose next action has its inputs."""
        for device in sorted(self._waiting):
            row = self._rows[device]
            if self._next[device] == len(row):
                self._waiting.remove(device)
                continue
            ends = [self._arrival(one, device) for one in self._inputs(row[self._next[device]])]
            arrival = max(ends, default=0.0)
            if arrival < math.inf:
                self._waiting.remove(device)
                heappush(self._arriving, (max(arrival, self._now), device))

    def _inputs(self, action: Action) -> Iterator[Action]:
        if action.kind is Kind.REDUCE:
            completing = (Kind.B, Kind.W)
            others = (a for a in self._actions if a.stage == action.stage)
            return (other for other in others if other.kind in completing)
        return (one for one in inputs(action) if one in self._actions)

    def _arrival(self, action: Action, device: int) -> float:
        away = self._plan.device_of(action) != device
        return self._ends.get(action, math.inf) + self._hop * away


def speed_of(speeds: Sequence[float], num_running: int) -> float:
    """The speed of each device while `num_running` devices compute."""
    known = min(num_running, len(speeds))
    return speeds[known - 1] * known / num_running


def speeds_seen(
    timelines: Sequence[Timeline], works_ns: Sequence[float], speeds: Sequence[float]
) -> list[float]:
    """The speeds for all devices of steps that were measured.

    While `n` devices compute, they do `n * speed` of the work in a nanosecond. This is taken to be
    linear in `n` beyond the speeds that are known; the work of a step then gives the last of them.

    Args:
        timelines: of steps of one plan, whose devices are more than `speeds`.
        works_ns: for each, the time of its actions at speed 1, measured beside it.
        speeds: the speeds while one, two, ... devices compute.
    """
    known, most = len(speeds), len(timelines[0].rows)
    at_once = [n * speed for n, speed in enumerate(speeds, 1)]
    found = []
    for timeline, work_ns in zip(timelines, works_ns, strict=True):
        left, slope = work_ns, 0.0
        for running, time_ns in _by_number(timeline).items():
            left -= time_ns * at_once[min(running, known) - 1]
            slope += time_ns * max(running - known, 0)
        if slope > 0:
            found.append(left / slope)
    # Further devices neither slow down all others nor do more than devices alone.
    by = min(max(median(found or [0.0]), 0.0), speeds[0])
    more = ((at_once[-1] + by * (n - known)) / n for n in range(known + 1, most + 1))
    return [*speeds, *more]


def lost_ns(timeline: Timeline, work_ns: float, speeds: Sequence[float]) -> float:
    """The time that an action has lost in a measured step of more devices than cores.

    Args:
        timeline: of a plan whose devices are more than `speeds`.
        work_ns: the time of the step's actions at speed 1.
        speeds: the speed of a device while one, two, ... devices compute, up to one for each core.
    """
    done = sum(n * speed_of(speeds, n) * ns for n, ns in _by_number(timeline).items())
    return (done - work_ns) / sum(len(row) for row in timeline.rows)


def _by_number(timeline: Timeline) -> dict[int, float]:
    """The time during which one, two, ... devices compute, in nanoseconds."""
    spans = [span for row in timeline.rows for span in row]
    changes = sorted([*((s.start_ns, 1) for s in spans), *((s.end_ns, -1) for s in spans)])
    found: dict[int, float] = {}
    running, before = 0, 0.0
    for now, change in changes:
        if running:
            found[running] = found.get(running, 0.0) + now - before
        running, before = running + change, now
    return found


def _times(plan: Plan, costs: Costs) -> dict[tuple[Kind, int], float]:
    """By kind and stage, the time that a device is busy with an action."""
    return {
        (kind, stage): costs.overhead_ns + ns
        for kind in TIME_OF
        for stage, ns in enumerate(by_stage(costs, kind, plan.num_stages))
    }
