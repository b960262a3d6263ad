"""When actions run, by recursion over what each waits for: written anew, not the core's."""

from dataclasses import dataclass, field
from functools import cached_property

from hypothesis import strategies as st

from pykern.plan import Action, Costs, Kind, Plan, with_reductions
from tests.plan.strategies import valid_plans


@dataclass(frozen=True)
class Times:
    """Costs by the names of `Costs`, all of them exact in binary, so that sums are exact too."""

    by_kind: dict[Kind, list[int]]
    transfer_ns: int
    overhead_ns: int
    message_bytes: list[int]
    bandwidth: float
    shared_links: bool
    overlap: float
    device_speeds: list[float]

    def costs(self) -> Costs:
        return Costs(
            self.by_kind[Kind.F],
            self.by_kind[Kind.B],
            self.transfer_ns,
            recompute_ns=self.by_kind[Kind.R],
            input_ns=self.by_kind[Kind.I],
            weight_ns=self.by_kind[Kind.W],
            update_ns=self.by_kind[Kind.U],
            reduce_ns=self.by_kind[Kind.REDUCE],
            overhead_ns=self.overhead_ns,
            message_bytes=self.message_bytes,
            bandwidth=self.bandwidth,
            shared_links=self.shared_links,
            overlap=self.overlap,
            device_speeds=self.device_speeds,
        )


@st.composite
def times_for(draw: st.DrawFn, plan: Plan) -> Times:
    def list_of(count: int) -> list[int]:
        return draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))

    timed = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W, Kind.U, Kind.REDUCE)
    speeds = st.sampled_from([0.5, 1.0, 2.0])
    num_devices = plan.num_devices
    return Times(
        by_kind={kind: list_of(plan.num_stages) for kind in timed},
        transfer_ns=draw(st.integers(0, 5)),
        overhead_ns=draw(st.integers(0, 2)),
        message_bytes=list_of(plan.num_stages),
        bandwidth=draw(st.sampled_from([0.5, 4.0, float("inf")])),
        shared_links=draw(st.booleans()),
        overlap=draw(st.sampled_from([0.0, 0.25, 1.0])),
        device_speeds=draw(st.lists(speeds, min_size=num_devices, max_size=num_devices)),
    )


def _cell(action: Action) -> tuple[int, int, int]:
    return action.stage, action.microbatch, action.slice


def _pairs(row: tuple[Action, ...]) -> list[int]:
    """Positions where an F may share its slot with the action behind it, none next to another."""
    starts: list[int] = []
    for position in range(len(row) - 1):
        first, second = row[position : position + 2]
        fits = first.kind is Kind.F and second.kind in (Kind.B, Kind.I)
        taken = bool(starts) and starts[-1] == position - 1
        if fits and first.microbatch != second.microbatch and not taken:
            starts.append(position)
    return starts


@st.composite
def full_plans(draw: st.DrawFn) -> Plan:
    """Plans with everything that a row may hold: recompute, reductions, updates, pairs."""
    plan = with_reductions(draw(valid_plans()))
    recomputed = draw(st.sets(st.integers(0, plan.num_stages - 1)))
    updated = draw(st.sets(st.integers(0, plan.num_stages - 1)))
    rows: list[tuple[Action, ...]] = []
    for row in plan.rows:
        longer: list[Action] = []
        for action in row:
            if action.kind in (Kind.B, Kind.I) and action.stage in recomputed:
                longer.append(Action(Kind.R, *_cell(action)))
            longer.append(action)
        forwards = {(a.stage, a.microbatch) for a in row if a.kind is Kind.F}
        longer += [Action(Kind.U, *cell) for cell in sorted(forwards) if cell[0] in updated]
        rows.append(tuple(longer))
    wide = Plan(plan.placement, plan.num_microbatches, rows, plan.num_slices)
    if not draw(st.booleans()):
        return wide
    overlaps = [_pairs(row) for row in wide.rows]
    paired = Plan(wide.placement, wide.num_microbatches, rows, wide.num_slices, overlaps)
    # Starting together may close a circle.
    return paired if Oracle(paired).can_run() else wide


@dataclass
class Oracle:
    """Needs, slots and times of a plan's actions."""

    plan: Plan
    times: Times | None = None
    _ends: dict[Action, float] = field(default_factory=dict)

    @cached_property
    def place(self) -> dict[Action, tuple[int, int]]:
        return {a: (d, p) for d, row in enumerate(self.plan.rows) for p, a in enumerate(row)}

    def device(self, action: Action) -> int:
        return self.place[action][0]

    def slot(self, action: Action) -> tuple[Action, ...]:
        """The action, or the pair that it is in."""
        device, position = self.place[action]
        row, starts = self.plan.rows[device], self.plan.overlaps[device]
        if position - 1 in starts:
            return row[position - 1 : position + 1]
        return row[position : position + 2] if position in starts else (action,)

    def before(self, action: Action) -> Action | None:
        """The actions that the device runs before the action's slot."""
        device, position = self.place[self.slot(action)[0]]
        return self.plan.rows[device][position - 1] if position > 0 else None

    def needs(self, action: Action) -> list[Action]:
        stage, microbatch, part = _cell(action)
        slices = range(self.plan.num_slices)
        wanted = {
            Kind.F: [(Kind.F, stage - 1, microbatch, part), (Kind.F, stage, microbatch, part - 1)],
            Kind.R: [(Kind.F, stage, microbatch, part)],
            Kind.W: [(Kind.I, stage, microbatch, part)],
            Kind.U: [
                *((kind, stage, microbatch, j) for kind in (Kind.B, Kind.W) for j in slices),
                (Kind.REDUCE, stage, 0, 0),
            ],
            Kind.REDUCE: [
                (kind, stage, m, j)
                for kind in (Kind.B, Kind.W)
                for m in range(self.plan.num_microbatches)
                for j in slices
            ],
        }
        backward = [
            (Kind.F, stage, microbatch, part),
            (Kind.R, stage, microbatch, part),
            *((kind, stage + 1, microbatch, part) for kind in (Kind.B, Kind.I)),
            *((kind, stage, microbatch, part + 1) for kind in (Kind.B, Kind.I)),
        ]
        numbers = wanted.get(action.kind, backward)
        actions = [Action(kind, s, m, j) for kind, s, m, j in numbers if s >= 0 and j >= 0]
        return [needed for needed in actions if needed in self.place]

    def can_run(self) -> bool:
        """Runs the rows by trial."""
        left = [list(row) for row in self.plan.rows]
        ran: set[Action] = set()
        progress = True
        while progress:
            progress = False
            for row in left:
                while row:
                    slot = self.slot(row[0])
                    if not ran.issuperset(n for a in slot for n in self.needs(a)):
                        break
                    ran.update(slot)
                    del row[: len(slot)]
                    progress = True
        return not any(left)

    def alone(self, action: Action) -> float:
        assert self.times is not None
        time = self.times.by_kind[action.kind][action.stage]
        return self.times.overhead_ns + time / self.times.device_speeds[self.device(action)]

    def link(self, action: Action) -> tuple[int, int] | None:
        """The devices that the action's result goes from and to."""
        step = {Kind.F: 1, Kind.B: -1, Kind.I: -1}.get(action.kind, 0)
        target = action.stage + step
        if step == 0 or not 0 <= target < self.plan.num_stages:
            return None
        replica = action.microbatch % self.plan.placement.num_replicas
        devices = self.device(action), self.plan.placement.device_of(target, replica)
        return None if devices[0] == devices[1] else devices

    def sent(self, action: Action) -> float:
        """When the message of an action has left its link."""
        assert self.times is not None
        boundary = action.stage - (action.kind is not Kind.F)
        start = self.end(action)
        if self.times.shared_links:
            device, position = self.place[action]
            ahead = self.plan.rows[device][:position]
            earlier = [other for other in ahead if self.link(other) == self.link(action)]
            start = max([start, *map(self.sent, earlier[-1:])])
        return start + self.times.message_bytes[boundary] / self.times.bandwidth

    def arrival(self, reader: Action, needed: Action) -> float:
        assert self.times is not None
        if self.device(reader) == self.device(needed):
            return self.end(needed)
        left = self.end(needed) if needed.stage == reader.stage else self.sent(needed)
        return left + self.times.transfer_ns

    def start(self, action: Action) -> float:
        slot, before = self.slot(action), self.before(action)
        arrivals = [self.arrival(a, needed) for a in slot for needed in self.needs(a)]
        return max([0.0, *arrivals, *([self.end(before)] if before else [])])

    def end(self, action: Action) -> float:
        assert self.times is not None
        if action not in self._ends:
            alone = sorted(map(self.alone, self.slot(action)))
            longest, others = alone[-1], sum(alone[:-1])
            self._ends[action] = self.start(action) + longest + (1 - self.times.overlap) * others
        return self._ends[action]
