"""Random plans that can run, for tests of what is done with plans."""

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from pykern.plan import Action, Kind, Placement, Plan


@dataclass(frozen=True)
class Shape:
    """The actions that a plan has to hold, in any order. `split` are the cells with I and W."""

    placement: Placement
    num_microbatches: int
    num_slices: int
    split: frozenset[tuple[int, int, int]]

    def cells(self) -> list[tuple[int, int, int]]:
        return [
            (stage, microbatch, part)
            for stage in range(self.placement.num_stages)
            for microbatch in range(self.num_microbatches)
            for part in range(self.num_slices)
        ]

    def backward(self, stage: int, microbatch: int, part: int) -> Action:
        kind = Kind.I if (stage, microbatch, part) in self.split else Kind.B
        return Action(kind, stage, microbatch, part)

    def actions(self) -> list[Action]:
        weights = [Action(Kind.W, *cell) for cell in sorted(self.split)]
        return [
            *(Action(Kind.F, *cell) for cell in self.cells()),
            *(self.backward(*cell) for cell in self.cells()),
            *weights,
        ]

    def needs(self, action: Action) -> list[Action]:
        """Written anew, not taken from the core, so that the two can be compared."""
        stage, microbatch, part = action.stage, action.microbatch, action.slice
        needed = []
        if action.kind is Kind.F:
            if stage > 0:
                needed.append(Action(Kind.F, stage - 1, microbatch, part))
            if part > 0:
                needed.append(Action(Kind.F, stage, microbatch, part - 1))
        elif action.kind is Kind.W:
            needed.append(Action(Kind.I, stage, microbatch, part))
        else:
            needed.append(Action(Kind.F, stage, microbatch, part))
            if stage + 1 < self.placement.num_stages:
                needed.append(self.backward(stage + 1, microbatch, part))
            if part + 1 < self.num_slices:
                needed.append(self.backward(stage, microbatch, part + 1))
        return needed

    def device_of(self, action: Action) -> int:
        replica = action.microbatch % self.placement.num_replicas
        return self.placement.device_of(action.stage, replica)

    def plan(self, slots: list[tuple[Action, ...]]) -> Plan:
        """The slots dealt to the rows of their devices."""
        rows: list[list[Action]] = [[] for _ in range(self.placement.num_devices)]
        overlaps: list[list[int]] = [[] for _ in rows]
        for slot in slots:
            device = self.device_of(slot[0])
            if len(slot) == 2:
                overlaps[device].append(len(rows[device]))
            rows[device] += slot
        return Plan(self.placement, self.num_microbatches, rows, self.num_slices, overlaps)

    def can_run(self, plan: Plan) -> bool:
        """Runs the rows by trial."""
        rows = [list(row) for row in plan.rows]
        ran: set[Action] = set()
        progress = True
        while progress:
            progress = False
            for row in rows:
                while row and ran.issuperset(self.needs(row[0])):
                    ran.add(row.pop(0))
                    progress = True
        return not any(rows)


@st.composite
def placements(draw: st.DrawFn, max_replicas: int) -> Placement:
    num_devices = draw(st.integers(1, 4))
    num_stages = draw(st.integers(1, 5))
    devices = st.lists(st.integers(0, num_devices - 1), min_size=num_stages, max_size=num_stages)
    return Placement.replicated(
        num_devices, draw(st.lists(devices, min_size=1, max_size=max_replicas))
    )


@st.composite
def shapes(draw: st.DrawFn, max_slices: int, max_replicas: int) -> Shape:
    placement = draw(placements(max_replicas))
    num_microbatches, num_slices = draw(st.integers(1, 4)), draw(st.integers(1, max_slices))
    shape = Shape(placement, num_microbatches, num_slices, frozenset())
    split = draw(st.sets(st.sampled_from(shape.cells())))
    return Shape(placement, num_microbatches, num_slices, frozenset(split))


def random_slots(shape: Shape, rng: random.Random, pair_chance: float) -> list[tuple[Action, ...]]:
    """Any order of all actions that puts each after what it needs.

    A forward that comes up takes a backward beside it, by chance, where one can start as well.
    """
    left = shape.actions()
    slots: list[tuple[Action, ...]] = []
    ran: set[Action] = set()
    while left:
        ready = [action for action in left if ran.issuperset(shape.needs(action))]
        first = rng.choice(ready)
        beside = [second for second in ready if can_share(shape, first, second)]
        pairs = beside and rng.random() < pair_chance
        slots.append((first, rng.choice(beside)) if pairs else (first,))
        ran.update(slots[-1])
        left = [action for action in left if action not in slots[-1]]
    return slots


def can_share(shape: Shape, first: Action, second: Action) -> bool:
    """Whether two actions that can both start may share a slot."""
    kinds = first.kind is Kind.F and second.kind in (Kind.B, Kind.I)
    alike = shape.device_of(first) == shape.device_of(second)
    return kinds and alike and first.microbatch != second.microbatch


@st.composite
def valid_plans_with_shape(
    draw: st.DrawFn, *, max_slices: int = 2, max_replicas: int = 2
) -> tuple[Plan, Shape]:
    shape = draw(shapes(max_slices, max_replicas))
    rng = draw(st.randoms(use_true_random=False))
    pair_chance = draw(st.sampled_from([0.0, 0.5, 1.0]))
    return shape.plan(random_slots(shape, rng, pair_chance)), shape


def valid_plans() -> st.SearchStrategy[Plan]:
    return valid_plans_with_shape().map(lambda pair: pair[0])


def plans_for_torch() -> st.SearchStrategy[Plan]:
    """Plans that torch's runtime can express: one replica, one slice."""
    return valid_plans_with_shape(max_slices=1, max_replicas=1).map(lambda pair: pair[0])


def random_plan_for_torch(rng: random.Random, num_devices: int) -> Plan:
    """A plan that torch's runtime can run: every device has stages, most slots are pairs.

    Stages stand in a V, interleaved, or anyhow.
    """
    num_stages = num_devices * rng.randint(1, 3)
    lap = list(range(num_devices))
    devices = {
        "V": (lap + lap[::-1]) * 2,
        "interleaved": lap * 3,
        "anyhow": rng.sample(lap, num_devices) + rng.choices(lap, k=2 * num_devices),
    }[rng.choice(["V", "interleaved", "anyhow"])]
    placement = Placement(num_devices, devices[:num_stages])
    whole = Shape(placement, rng.randint(1, 5), 1, frozenset())
    split_chance = rng.choice([0.0, 0.5, 1.0])
    split = frozenset(cell for cell in whole.cells() if rng.random() < split_chance)
    shape = Shape(placement, whole.num_microbatches, 1, split)
    return shape.plan(random_slots(shape, rng, rng.choice([0.0, 0.9])))
