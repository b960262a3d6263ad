"""Fits a plan's activations into a memory budget at the least predicted time.

Each stage gets a level of the kernels and, where that is not enough, microbatches that are
recomputed: as few as the budget allows, first those whose R costs nothing because their device
waits before their backward anyway. The simulator decides between the candidates, and the levels
that are the same everywhere are among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..plan import Action, Costs, Kind, Memory, Plan, Timeline, simulate, with_recompute
from .fit_memory import most_held
from .level_costs import StageCosts, StageLevel, costs_of, memory_of

_BACKWARD = (Kind.B, Kind.I)


@dataclass(frozen=True)
class Fitted:
    """A plan that fits.

    Attributes:
        plan: with the R of every cell that is recomputed.
        levels: one for each stage.
        timeline: as the simulator predicts it.
        peak_bytes: predicted for each device, with what its actions need beside.
        budget_bytes: what each device may hold.
    """

    plan: Plan
    levels: tuple[StageLevel, ...]
    timeline: Timeline
    peak_bytes: tuple[float, ...]
    budget_bytes: tuple[float, ...]

    def __str__(self) -> str:
        """A line for each stage and each device, and the step's predicted time."""
        placement = self.plan.placement
        lines = []
        for stage, levels in enumerate(self.by_microbatch()):
            counts = ", ".join(f"{level} x {n}" for level, n in Counter(levels).items())
            lines.append(f"stage {stage} on device {placement.device_of(stage)}: {counts}")
        for device, (peak, budget) in enumerate(
            zip(self.peak_bytes, self.budget_bytes, strict=True)
        ):
            lines.append(f"device {device}: {peak:,.0f} of {budget:,.0f} bytes of activations")
        lines.append(f"step: {self.timeline.makespan_ns / 1e6:.3f} ms predicted")
        return "\n".join(lines)

    def by_microbatch(self) -> list[list[str]]:
        """The level of every microbatch of every stage."""
        levels = [[level.kept] * self.plan.num_microbatches for level in self.levels]
        for row in self.plan.rows:
            for action in row:
                rebuilt = self.levels[action.stage].rebuilt
                if action.kind is Kind.R and rebuilt is not None:
                    levels[action.stage][action.microbatch] = rebuilt
        return levels


def fit(plan: Plan, stages: Sequence[StageCosts], budget_bytes: Sequence[float]) -> Fitted:
    """The fastest levels found under which no device holds more than its budget.

    Args:
        plan: with backwards and without R.
        stages: what each level costs each stage.
        budget_bytes: one for each device.

    Raises:
        ValueError: the plan holds R or no backward, a number does not fit the plan, or a device's
            budget is too small for any levels; the message says what it needs at least.
    """
    if plan.has(Kind.R) or not any(plan.has(kind) for kind in _BACKWARD):
        raise ValueError("levels are chosen for plans with a backward and without R")
    if len(stages) != plan.num_stages:
        raise ValueError(f"there are costs of {len(stages)} stages, and {plan.num_stages} stages")
    if len(budget_bytes) != plan.num_devices:
        raise ValueError(
            f"there are budgets of {len(budget_bytes)} devices, and {plan.num_devices} devices"
        )
    return _Fit(plan, stages, budget_bytes).best()


class _Fit:
    def __init__(
        self, plan: Plan, stages: Sequence[StageCosts], budget_bytes: Sequence[float]
    ) -> None:
        self._plan = plan
        self._stages = stages
        self._budgets = tuple(budget_bytes)
        placement = plan.placement
        self._devices_of = [
            sorted({placement.device_of(stage, r) for r in range(placement.num_replicas)})
            for stage in range(plan.num_stages)
        ]
        self._caps = list(self._budgets)

    def best(self) -> Fitted:
        """See `fit`."""
        fitting: list[Fitted] = []
        # The extra bytes depend on the levels, and the levels on the extra bytes: least and most.
        for beside in (self._least_beside, self._beside):
            self._caps = [budget - beside(d) for d, budget in enumerate(self._budgets)]
            candidates = [self._try(levels) for levels in self._uniform()]
            fitting += [candidate for candidate in candidates if candidate is not None]
            mixed = self._mixed()
            if mixed is not None:
                fitting.append(mixed)
                break
        if not fitting:
            raise ValueError(self._refusal())
        return min(fitting, key=lambda fitted: fitted.timeline.makespan_ns)

    def _least_beside(self, device: int) -> float:
        """The bytes that each of the device's stages needs at some level beyond those of cells."""
        found = [0.0]
        for stage in self._stages_on(device):
            costs = self._stages[stage]
            measured = [kept.held for kept in costs.kept.values()]
            needs = [max(held.beside.values()) for held in measured if held is not None]
            found.append(min(needs, default=costs.workspace_bytes))
        return max(found)

    def _beside(self, device: int) -> float:
        """What the device needs at most beside what its cells hold."""
        stages = self._stages_on(device)
        workspace = max((self._stages[stage].workspace_bytes for stage in stages), default=0.0)
        # A gradient waits for a cell of the previous stage.
        gradients = sum(
            self._stages[stage].gradient_bytes * self._most_cells(stage - 1)
            for stage in stages
            if stage > 0
        )
        return workspace + gradients

    def _most_cells(self, stage: int) -> int:
        """Of a stage, between their F and the end of their B or I at a time."""
        most = now = 0
        for device in self._devices_of[stage]:
            for action in self._plan.rows[device]:
                if action.stage == stage and action.kind is Kind.F:
                    now += 1
                    most = max(most, now)
                elif action.stage == stage and action.kind in _BACKWARD:
                    now -= 1
        return most

    def _costs_of(self, levels: Sequence[StageLevel]) -> Costs:
        return costs_of(self._stages, levels, self._plan.num_microbatches)

    def _stages_on(self, device: int) -> list[int]:
        return [stage for stage, devices in enumerate(self._devices_of) if device in devices]

    # --- the same level everywhere ---

    def _uniform(self) -> Iterator[list[StageLevel]]:
        every = frozenset(range(self._plan.num_microbatches))
        for kept in self._common(stage.kept for stage in self._stages):
            yield [StageLevel(kept)] * len(self._stages)
            for rebuilt in self._common(stage.rebuilt for stage in self._stages):
                yield [StageLevel(kept, rebuilt, every)] * len(self._stages)

    @staticmethod
    def _common(levels: Iterable[Iterable[str]]) -> list[str]:
        first, *others = (list(of_stage) for of_stage in levels)
        return [level for level in first if all(level in other for other in others)]

    # --- as each device needs ---

    def _mixed(self) -> Fitted | None:
        """Starts from what is best for each device alone, and changes it one device at a time."""
        options = [self._options(device) for device in range(self._plan.num_devices)]
        if not all(options):
            return None
        chosen: list[StageLevel] = [StageLevel("")] * len(self._stages)
        for device_options in options:
            _assign(chosen, device_options[0])
        best = self._try(chosen)
        for device_options in options:
            for option in device_options[1:]:
                changed = list(chosen)
                _assign(changed, option)
                candidate = self._try(changed)
                if candidate is not None and (best is None or _faster(candidate, best)):
                    best, chosen = candidate, changed
        return best

    def _options(self, device: int) -> list[dict[int, StageLevel]]:
        """Levels of a device's stages that fit, those first that keep it busy for less time."""
        stages = self._stages_on(device)
        found: list[tuple[float, int, dict[int, StageLevel]]] = []
        for kept in self._common(self._stages[stage].kept for stage in stages):
            for rebuilt in [None, *self._common(self._stages[stage].rebuilt for stage in stages)]:
                priced = self._recomputed(device, kept, rebuilt)
                if priced is None:
                    continue
                price, cells = priced
                levels = {
                    stage: StageLevel(
                        kept,
                        rebuilt,
                        frozenset(m for s, m in cells if s == stage),
                    )
                    for stage in stages
                }
                found.append((price, len(found), levels))
        return [levels for _, _, levels in sorted(found, key=lambda option: option[:2])]

    def _recomputed(
        self, device: int, kept: str, rebuilt: str | None
    ) -> tuple[float, set[tuple[int, int]]] | None:
        """The cells a device has to recompute and how long it is busy then; None if no set fits."""
        row = self._plan.rows[device]
        sweep = _Sweep(row, self._stages, kept, rebuilt, self._gaps(device, kept))
        for position in range(len(row)):
            if not sweep.take(position, self._caps[device]):
                return None
        busy = sum(
            self._stages[action.stage].kept[kept].forward_ns
            + self._stages[action.stage].kept[kept].backward_ns
            for action in row
            if action.kind is Kind.F
        )
        return busy + sum(sweep.price(cell) for cell in sweep.recomputed), sweep.recomputed

    def _gaps(self, device: int, kept: str) -> dict[tuple[int, int], float]:
        """How long the device waits right before the backward of each cell, if nothing is done."""
        levels = [StageLevel(kept if kept in s.kept else next(iter(s.kept))) for s in self._stages]
        timeline = simulate(self._plan, self._costs_of(levels))
        gaps: dict[tuple[int, int], float] = {}
        free = 0.0
        for span in timeline.rows[device]:
            if span.action.kind in _BACKWARD:
                gaps[span.action.stage, span.action.microbatch] = max(span.start_ns - free, 0.0)
            free = max(free, span.end_ns)
        return gaps

    # --- what it comes to ---

    def _try(self, levels: Sequence[StageLevel]) -> Fitted | None:
        """The plan at these levels; None where it does not fit."""
        cells = _cells(levels)
        costs = self._costs_of(levels)
        memory = memory_of(self._stages, levels)
        plan = self._plan
        if cells:
            # One cap for all devices: what a stage holds is told in shares of what its device may.
            caps = [max(cap, 1.0) for cap in self._caps]
            shares = [1 / min(caps[d] for d in devices) for devices in self._devices_of]
            plan = with_recompute(plan, cells, costs, _scaled(memory, shares), 1.0)
        peaks = tuple(most_held(plan, self._stages, levels))
        if any(peak > budget for peak, budget in zip(peaks, self._budgets, strict=True)):
            return None
        return Fitted(plan, tuple(levels), simulate(plan, costs), peaks, self._budgets)

    def _refusal(self) -> str:
        least = [min(self._least(device)) for device in range(self._plan.num_devices)]
        pairs = zip(range(len(least)), least, self._budgets, strict=True)
        short = [(device, need, has) for device, need, has in pairs if need > has]
        if not short:
            return "no levels fit the budgets of all devices together"
        device, need, has = short[0]
        return (
            f"device {device} may hold {has:,.0f} bytes of activations, and needs at least "
            f"{need:,.0f} at any level"
        )

    def _least(self, device: int) -> Iterator[float]:
        """What the device holds at most, at each level that keeps as little as it can."""
        for levels in self._uniform():
            cells = _cells(levels)
            memory = memory_of(self._stages, levels)
            plan = self._plan
            if cells:
                plan = with_recompute(plan, cells, self._costs_of(levels), memory, 0.0)
            yield most_held(plan, self._stages, levels)[device]


class _Sweep:
    """Goes along a device's row and gives up keeping a cell whenever too much is held."""

    def __init__(
        self,
        row: Sequence[Action],
        stages: Sequence[StageCosts],
        kept: str,
        rebuilt: str | None,
        gaps: dict[tuple[int, int], float],
    ) -> None:
        self.recomputed: set[tuple[int, int]] = set()
        self._row = row
        on_row = {action.stage for action in row}
        self._kept = {s: stages[s].kept[kept] for s in on_row}
        self._rebuilt = {s: stages[s].rebuilt[rebuilt] for s in on_row} if rebuilt else {}
        self._gaps = gaps
        self._ends = {
            (action.stage, action.microbatch): position
            for position, action in enumerate(row)
            if action.kind in _BACKWARD
        }
        # Of what is kept whole now.
        self._alive: set[tuple[int, int]] = set()
        self._held = 0.0

    def price(self, cell: tuple[int, int]) -> float:
        """How much longer the device is busy if it recomputes the cell."""
        rebuilt = self._rebuilt[cell[0]]
        return max(rebuilt.recompute_ns - self._gaps[cell], 0.0) + rebuilt.backward_ns

    def take(self, position: int, cap: float) -> bool:
        """Runs the action there; False if it cannot be within the cap."""
        action = self._row[position]
        cell = action.stage, action.microbatch
        cost = self._kept[action.stage]
        if action.kind is Kind.F:
            self._held += cost.activation_bytes
            self._alive.add(cell)
        elif action.kind in _BACKWARD:
            graph = cost.activation_bytes
            if cell in self.recomputed:
                graph = self._rebuilt[action.stage].activation_bytes
                self._held += graph - self._rebuilt[action.stage].boundary_bytes
            self._alive.discard(cell)
            fits = self._give_up(position, cap)
            self._held += (cost.weights_bytes if action.kind is Kind.I else 0.0) - graph
            return fits
        elif action.kind is Kind.W:
            self._held -= cost.weights_bytes
        return self._give_up(position, cap)

    def _give_up(self, position: int, cap: float) -> bool:
        while self._held > cap:
            # One whose backward is next would be there again at once.
            candidates = [
                cell
                for cell in self._alive
                if cell[0] in self._rebuilt
                and self._ends[cell] > position + 1
                and self._saving(cell) > 0
            ]
            if not candidates:
                return False
            chosen = min(candidates, key=lambda cell: (self.price(cell), -self._ends[cell]))
            self._alive.remove(chosen)
            self.recomputed.add(chosen)
            self._held -= self._saving(chosen)
        return True

    def _saving(self, cell: tuple[int, int]) -> float:
        return self._kept[cell[0]].activation_bytes - self._rebuilt[cell[0]].boundary_bytes


def _cells(levels: Sequence[StageLevel]) -> list[Action]:
    """The R of everything that is recomputed."""
    return [
        Action(Kind.R, stage, microbatch)
        for stage, level in enumerate(levels)
        if level.rebuilt is not None
        for microbatch in sorted(level.microbatches)
    ]


def _scaled(memory: Memory, factors: Sequence[float]) -> Memory:
    def scaled(values: float | Sequence[float]) -> list[float]:
        of_stages = [values] * len(factors) if isinstance(values, float) else values
        return [value * factor for value, factor in zip(of_stages, factors, strict=True)]

    return Memory(
        scaled(memory.activation_bytes),
        scaled(memory.kept_bytes),
        scaled(memory.boundary_bytes),
        scaled(memory.rebuilt_bytes),
    )


def _assign(levels: list[StageLevel], chosen: dict[int, StageLevel]) -> None:
    for stage, level in chosen.items():
        levels[stage] = level


def _faster(one: Fitted, other: Fitted) -> bool:
    return one.timeline.makespan_ns < other.timeline.makespan_ns
