"""A plan without an end, in parts: one for each batch, and one that drains what is in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from pykern._C import Action, Costs, Kind, Plan, simulate, weight_versions

# Makes the plan for as many microbatches.
MakePlan = Callable[[int], Plan]

# From this batch on all parts are alike. Two go before it: the first fills the pipeline, and with a
# delay of two groups the second has no update yet.
_ALIKE = 2

# What places the cuts: a backward takes about twice as long as a forward, and an update is short.
_COSTS = Costs(1.0, 2.0)


@dataclass(frozen=True)
class PlanPart:
    """What stands between two positions of each row.

    Attributes:
        plan: the whole.
        begins: by device.
        ends: by device.
    """

    plan: Plan
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def rows(self) -> list[tuple[Action, ...]]:
        """The actions of each device."""
        bounds = zip(self.plan.rows, self.begins, self.ends, strict=True)
        return [row[begin:end] for row, begin, end in bounds]


class Parts:
    """The parts of a schedule that updates weights within a step.

    A long plan is cut where the first stage would begin with the next batch, every device at that
    time by the simulator. So no device waits for a ramp between two parts, but only for those that
    are slower than the simulator thinks. Batches are counted since the pipeline was empty.
    From the third on their parts are alike but for the numbers of microbatches.

    Args:
        make: the schedule, for any number of microbatches.
        num_microbatches: of a batch.

    Attributes:
        plan: for one batch alone.
        windows: by batch, what is run when it is given.
        rests: by batch, what drains the pipeline after it, its last updates at the least.
        group: microbatches of an update.
        num_slots: no two microbatches in flight have the same number modulo this.
        versions: by stage, the most versions of its weights that are held at once.

    Raises:
        ValueError: the schedule's parts are not alike, or its groups do not fit into batches.
    """

    def __init__(self, make: MakePlan, num_microbatches: int) -> None:
        self._size = num_microbatches
        # Of one batch, and its flush.
        self.plan = make(num_microbatches)
        if num_microbatches < self.plan.num_devices:
            raise ValueError(
                f"microbatches must be at least the number of devices, {self.plan.num_devices}, "
                f"where nothing is flushed between batches, got {num_microbatches}"
            )
        num_batches = _ALIKE + 3
        self._plan = make(num_batches * num_microbatches)
        self.group = _group_of(self._plan, num_microbatches)
        _require_one_version(self._plan, self.group)
        self.num_slots = (_ALIKE + 2) * num_microbatches
        self.versions = weight_versions(self._plan)
        self._cuts = _cuts(self._plan, num_microbatches)
        windows = [PlanPart(self._plan, *ends) for ends in pairwise(self._cuts)]
        rests = [self._rest(make(k * num_microbatches)) for k in range(1, num_batches)]
        for alike in (windows[_ALIKE:], rests[_ALIKE:]):
            first, second = (_shifted(part, -k * num_microbatches) for k, part in enumerate(alike))
            if first != second:
                raise ValueError(
                    "the schedule does not do the same with each batch of "
                    f"{num_microbatches} microbatches, which running without a flush needs"
                )
        self.windows: Sequence[PlanPart] = windows[: _ALIKE + 1]
        self.rests: Sequence[PlanPart] = rests[: _ALIKE + 1]

    def alike(self, number: int) -> tuple[int, int]:
        """Which of the windows, or rests, is that of a batch.

        Returns:
            Its position, and what to add to its microbatches to count them from when the pipeline
            was empty.
        """
        position = min(number, _ALIKE)
        return position, (number - position) * self._size

    def _rest(self, plan: Plan) -> PlanPart:
        """What is left of a plan of some batches when the next one does not come."""
        begins = self._cuts[plan.num_microbatches // self._size]
        for row, long, begin in zip(plan.rows, self._plan.rows, begins, strict=True):
            if row[:begin] != long[:begin]:
                raise ValueError(
                    "the schedule begins with another order when it has fewer microbatches, so it "
                    "cannot go on without knowing how many there will be"
                )
        return PlanPart(plan, begins, tuple(map(len, plan.rows)))


def _group_of(plan: Plan, num_microbatches: int) -> int:
    """How many microbatches an update is of."""
    ends = [
        sorted(action.microbatch + 1 for action in _of_stage(plan, Kind.U, stage))
        for stage in range(plan.num_stages)
    ]
    group = ends[0][0] if ends[0] else 0
    if group == 0 or num_microbatches % group:
        of = "no microbatches" if group == 0 else f"groups of {group}"
        raise ValueError(
            f"the schedule updates weights for {of}, but microbatches={num_microbatches} must be a "
            "multiple of such a group: an update belongs to one batch"
        )
    expected = list(range(group, plan.num_microbatches + 1, group))
    for stage, of_stage in enumerate(ends):
        if of_stage != expected:
            raise ValueError(
                f"stage {stage} updates its weights after {_some(of_stage)} microbatches, and not "
                f"after every {group}"
            )
    return group


def _require_one_version(plan: Plan, group: int) -> None:
    """Raises ValueError where a group reads two versions, or an update misses a backward."""
    updates = [0] * plan.num_stages
    # By stage and group: the version that its forwards read, and how many backwards have ended.
    read: dict[tuple[int, int], int] = {}
    ended: Counter[tuple[int, int]] = Counter()
    for action in chain.from_iterable(plan.rows):
        stage = action.stage
        of_group = stage, action.microbatch // group
        if action.kind is Kind.F:
            if read.setdefault(of_group, updates[stage]) != updates[stage]:
                raise ValueError(
                    f"{action} reads newer weights than those before it in its group of {group} "
                    "microbatches: an update is of gradients at one version"
                )
        elif action.kind in (Kind.B, Kind.W):
            ended[of_group] += 1
        elif action.kind is Kind.U:
            updates[stage] += 1
            if ended[of_group] < group:
                raise ValueError(f"{action} stands before a backward of its group of {group}")


def _cuts(plan: Plan, num_microbatches: int) -> list[tuple[int, ...]]:
    """Where each row is when the first stage would begin with a batch, by batch."""
    rows = simulate(plan, _COSTS).rows
    begins = {span.action: span.start_ns for row in rows for span in row}
    cuts = []
    for first in range(0, plan.num_microbatches, num_microbatches):
        time_ns = begins[Action(Kind.F, 0, first)]
        cuts.append(tuple(sum(span.start_ns < time_ns for span in row) for row in rows))
    return cuts


def _shifted(part: PlanPart, by: int) -> list[list[tuple[Kind, int, int]]]:
    return [[(a.kind, a.stage, a.microbatch + by) for a in row] for row in part.rows]


def _of_stage(plan: Plan, kind: Kind, stage: int) -> list[Action]:
    return [a for row in plan.rows for a in row if a.kind is kind and a.stage == stage]


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:4])) + (", ..." if len(numbers) > 4 else "")
