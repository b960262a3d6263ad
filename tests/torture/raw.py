"""Plans as plain tuples: they are mutated, judged by the rules, and made into a `Plan`."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

from pykern.plan import Action, Kind, Placement, Plan

# Kind, stage, microbatch, slice.
Cell = tuple[int, int, int]
RawAction = tuple[str, int, int, int]


@dataclass(frozen=True)
class Raw:
    """A plan that nobody has looked at."""

    num_devices: int
    replicas: list[list[int]]
    num_microbatches: int
    num_slices: int
    rows: list[list[RawAction]]
    overlaps: list[list[int]] = field(default_factory=list)

    @property
    def num_stages(self) -> int:
        return len(self.replicas[0])

    def device_of(self, action: RawAction) -> int:
        """The device of the action: replicas take turns with the microbatches."""
        return self.replicas[action[2] % len(self.replicas)][action[1]]

    def plan(self) -> Plan:
        """The `Plan` of it, which is refused where it is not even a table."""
        placement = Placement.replicated(self.num_devices, self.replicas)
        rows = [[_action(*action) for action in row] for row in self.rows]
        return Plan(placement, self.num_microbatches, rows, self.num_slices, self.overlaps)

    def copy(self) -> "Raw":
        """With lists of its own."""
        return replace(
            self,
            replicas=[list(replica) for replica in self.replicas],
            rows=[list(row) for row in self.rows],
            overlaps=[list(starts) for starts in self.overlaps],
        )


@cache
def _action(kind: str, stage: int, microbatch: int, part: int) -> Action:
    return Action(Kind[kind], stage, microbatch, part)


def raw_of(plan: Plan) -> Raw:
    """The same plan as tuples."""
    return Raw(
        plan.num_devices,
        [list(replica) for replica in plan.placement.replicas],
        plan.num_microbatches,
        plan.num_slices,
        [[(a.kind.name, a.stage, a.microbatch, a.slice) for a in row] for row in plan.rows],
        [list(starts) for starts in plan.overlaps],
    )


@dataclass(frozen=True)
class Form:
    """How often a random plan has what not every plan has, each from 0 to 1."""

    max_devices: int = 4
    max_stages: int = 5
    max_microbatches: int = 4
    replicas: float = 0.2
    slices: float = 0.1
    forward_only: float = 0.05
    split: float = 0.5
    recompute: float = 0.3
    offload: float = 0.1
    reductions: float = 0.15
    updates: float = 0.1
    pairs: float = 0.1


def random_plan(rng: random.Random, form: Form) -> Raw:
    """A plan that can run: every action in any order that puts it behind what it needs."""
    num_devices = rng.randint(1, form.max_devices)
    num_stages = rng.randint(1, form.max_stages)
    num_replicas = 2 if rng.random() < form.replicas else 1
    replicas = [
        [rng.randrange(num_devices) for _ in range(num_stages)] for _ in range(num_replicas)
    ]
    num_microbatches = rng.randint(1, form.max_microbatches)
    num_slices = 2 if rng.random() < form.slices else 1
    raw = Raw(num_devices, replicas, num_microbatches, num_slices, [[] for _ in range(num_devices)])
    for action in _random_order(rng, _needs(rng, raw, form)):
        raw.rows[raw.device_of(action)].append(action)
    raw.overlaps.extend([] for _ in raw.rows)
    if rng.random() < form.pairs:
        for row, starts in zip(raw.rows, raw.overlaps, strict=True):
            starts.extend(_pairs(rng, row))
    return raw


def _needs(rng: random.Random, raw: Raw, form: Form) -> dict[RawAction, list[RawAction]]:
    """The actions of the plan, each with the actions that it waits for."""
    needs: dict[RawAction, list[RawAction]] = {}
    cells = [
        (stage, microbatch, part)
        for stage in range(raw.num_stages)
        for microbatch in range(raw.num_microbatches)
        for part in range(raw.num_slices)
    ]
    for stage, microbatch, part in cells:
        before = [("F", stage - 1, microbatch, part)] if stage else []
        before += [("F", stage, microbatch, part - 1)] if part else []
        needs["F", stage, microbatch, part] = before
    if rng.random() < form.forward_only:
        return needs
    chance: Callable[[float], float] = lambda share: rng.random() if rng.random() < share else 0.0  # noqa: E731
    split, recompute, offload = chance(form.split), chance(form.recompute), chance(form.offload)
    halves = {cell: rng.random() < split for cell in cells}
    backward: dict[Cell, RawAction] = {c: ("I" if halves[c] else "B", *c) for c in cells}
    for cell in cells:
        stage, microbatch, part = cell
        needed: list[RawAction] = [("F", *cell)]
        if rng.random() < offload:
            needs["OFFLOAD", *cell], needs["LOAD", *cell] = [("F", *cell)], [("OFFLOAD", *cell)]
            needed.append(("LOAD", *cell))
        if rng.random() < recompute:
            needs["R", *cell] = list(needed)
            needed.append(("R", *cell))
        for later in ((stage + 1, microbatch, part), (stage, microbatch, part + 1)):
            needed += [backward[later]] if later in backward else []
        needs[backward[cell]] = needed
        if halves[cell]:
            needs["W", *cell] = [("I", *cell)]
    _add_sums(rng, needs, raw, form, {c: ("W" if halves[c] else "B", *c) for c in cells})
    return needs


def _add_sums(
    rng: random.Random,
    needs: dict[RawAction, list[RawAction]],
    raw: Raw,
    form: Form,
    last: dict[Cell, RawAction],
) -> None:
    reduced = rng.random() < form.reductions
    if reduced:
        for stage in range(raw.num_stages):
            needs["REDUCE", stage, 0, 0] = [a for cell, a in last.items() if cell[0] == stage]
    if rng.random() < form.updates:
        for stage in range(raw.num_stages):
            microbatch = rng.randrange(raw.num_microbatches)
            needs["U", stage, microbatch, 0] = [last[stage, microbatch, 0]]
            if reduced:
                needs["U", stage, microbatch, 0].append(("REDUCE", stage, 0, 0))


def _random_order(rng: random.Random, needs: dict[RawAction, list[RawAction]]) -> list[RawAction]:
    missing = {action: len(needed) for action, needed in needs.items()}
    readers: dict[RawAction, list[RawAction]] = {action: [] for action in needs}
    for action, needed in needs.items():
        for one in needed:
            readers[one].append(action)
    ready = [action for action, count in missing.items() if count == 0]
    order = []
    while ready:
        place = rng.randrange(len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        action = ready.pop()
        order.append(action)
        for reader in readers[action]:
            missing[reader] -= 1
            if missing[reader] == 0:
                ready.append(reader)
    return order


def _pairs(rng: random.Random, row: list[RawAction]) -> list[int]:
    """Positions of an F in front of a B or I of another microbatch; not every one is taken."""
    starts: list[int] = []
    for position, (first, second) in enumerate(pairwise(row)):
        fits = first[0] == "F" and second[0] in ("B", "I") and first[2] != second[2]
        if fits and starts[-1:] != [position - 1] and rng.random() < 0.7:
            starts.append(position)
    return starts
