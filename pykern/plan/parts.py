"""A plan without an end, in parts: one for each batch, and one that drains what is in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from pykern._C import Action, Costs, Kind, Plan, simulate, weight_versions

# A function that makes the plan for a number of microbatches.
MakePlan = Callable[[int], Plan]

# From this batch on all parts are alike. Two batches precede it: the first fills the pipeline, and
# with a delay of two groups the second has no update yet.
_ALIKE = 2

# The costs that place the cuts: a backward takes twice as long as a forward, an update no time.
_COSTS = Costs(1.0, 2.0)


@dataclass(frozen=True)
class PlanPart:
    """The actions of a plan between two positions of each row.

    Attributes:
        plan: the whole plan.
        begins: the position of the first action, by device.
        ends: the position behind the last action, by device.
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

    A long plan is cut at the times when the first stage would begin with the next batch; the
    simulator tells where every device is at that time. So no device waits for a ramp between two
    parts, but only for devices that are slower than simulated. Batches are counted since the
    pipeline was empty. From the third batch on, the parts are alike except that the microbatches
    have other numbers.

    Args:
        make: the schedule, for any number of microbatches.
        num_microbatches: number of microbatches of a batch.

    Attributes:
        plan: the plan for one batch alone, with its flush.
        windows: by batch, the part that runs when the batch is given.
        rests: by batch, the part that drains the pipeline after it, at least its last updates.
        group: number of microbatches of an update.
        num_slots: no two microbatches in flight have the same number modulo this number.
        versions: by stage, the most versions of its weights that are held at once.

    Raises:
        ValueError: the schedule's parts are not alike, or its groups do not fit into batches.
    """

    def __init__(self, make: MakePlan, num_microbatches: int) -> None:
        self._size = num_microbatches
        # The plan of one batch, with its flush.
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
                    f"the schedule must do the same with each batch of {num_microbatches} "
                    "microbatches to run without a flush, got one that does not"
                )
        self.windows: Sequence[PlanPart] = windows[: _ALIKE + 1]
        self.rests: Sequence[PlanPart] = rests[: _ALIKE + 1]

    def alike(self, number: int) -> tuple[int, int]:
        """The position of a batch's part in `windows` and `rests`.

        Returns:
            The position, and the offset to add to the part's microbatches so that they are counted
            since the pipeline was empty.
        """
        position = min(number, _ALIKE)
        return position, (number - position) * self._size

    def _rest(self, plan: Plan) -> PlanPart:
        """The rest of a plan of some batches, which runs if the next batch does not come."""
        begins = self._cuts[plan.num_microbatches // self._size]
        for row, long, begin in zip(plan.rows, self._plan.rows, begins, strict=True):
            if row[:begin] != long[:begin]:
                raise ValueError(
                    "the schedule must begin alike for any number of microbatches to go on "
                    "without a flush, got another order for fewer"
                )
        return PlanPart(plan, begins, tuple(map(len, plan.rows)))


def _group_of(plan: Plan, num_microbatches: int) -> int:
    """The number of microbatches of an update."""
    ends = [
        sorted(action.microbatch + 1 for action in _of_stage(plan, Kind.U, stage))
        for stage in range(plan.num_stages)
    ]
    group = ends[0][0] if ends[0] else 0
    if group == 0 or num_microbatches % group:
        of = "no microbatches" if group == 0 else f"groups of {group}"
        raise ValueError(
            "microbatches must be a multiple of the group after which the schedule updates "
            f"weights, got {num_microbatches} and {of}. An update belongs to one batch"
        )
    expected = list(range(group, plan.num_microbatches + 1, group))
    for stage, of_stage in enumerate(ends):
        if of_stage != expected:
            raise ValueError(
                f"the schedule must update weights after every {group} microbatches, got updates "
                f"of stage {stage} after {_some(of_stage)}"
            )
    return group


def _require_one_version(plan: Plan, group: int) -> None:
    """Raises ValueError if a group reads two versions, or an update misses a backward."""
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
                    f"forwards must read one version of weights in a group of {group} "
                    f"microbatches, got {action} with a newer one"
                )
        elif action.kind in (Kind.B, Kind.W):
            ended[of_group] += 1
        elif action.kind is Kind.U:
            updates[stage] += 1
            if ended[of_group] < group:
                raise ValueError(
                    f"updates must come after all backwards of their group of {group}, got "
                    f"{action} before one"
                )


def _cuts(plan: Plan, num_microbatches: int) -> list[tuple[int, ...]]:
    """By batch, the position of each row when the first stage would begin with the batch."""
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
