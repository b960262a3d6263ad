"""Random plans that can run, for tests of what is done with plans."""

import random
from dataclasses import dataclass

from hypothesis import strategies as st

from pykern.plan import Action, Kind, Placement, Plan


@dataclass(frozen=True)
class Shape:
    """What a plan has to hold, whatever its order. `split` are the cells with I and W."""

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

    def plan(self, order: list[Action]) -> Plan:
        """The actions dealt to the rows of their devices."""
        rows: list[list[Action]] = [[] for _ in range(self.placement.num_devices)]
        for action in order:
            replica = action.microbatch % self.placement.num_replicas
            rows[self.placement.device_of(action.stage, replica)].append(action)
        return Plan(self.placement, self.num_microbatches, rows, self.num_slices)

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
def shapes(draw: st.DrawFn, max_slices: int) -> Shape:
    placement = draw(placements(2))
    num_microbatches, num_slices = draw(st.integers(1, 4)), draw(st.integers(1, max_slices))
    shape = Shape(placement, num_microbatches, num_slices, frozenset())
    split = draw(st.sets(st.sampled_from(shape.cells())))
    return Shape(placement, num_microbatches, num_slices, frozenset(split))


def random_order(shape: Shape, rng: random.Random) -> list[Action]:
    """Any order of all actions that puts each after what it needs."""
    left = shape.actions()
    order: list[Action] = []
    ran: set[Action] = set()
    while left:
        ready = [action for action in left if ran.issuperset(shape.needs(action))]
        action = rng.choice(ready)
        left.remove(action)
        ran.add(action)
        order.append(action)
    return order


@st.composite
def valid_plans_with_shape(draw: st.DrawFn, *, max_slices: int = 2) -> tuple[Plan, Shape]:
    shape = draw(shapes(max_slices))
    rng = draw(st.randoms(use_true_random=False))
    return shape.plan(random_order(shape, rng)), shape


def valid_plans() -> st.SearchStrategy[Plan]:
    return valid_plans_with_shape().map(lambda pair: pair[0])
